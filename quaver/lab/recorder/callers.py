"""Finds the source line that called an operator, from inside a dispatch mode.

The Python stack at dispatch has torch's frames innermost, then the calling line. The search notes frames of FSDP2's
collectives and of a selective checkpoint. It ends at autograd's engine, since a node that runs in C++ has no Python
frame.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch import Tensor

from quaver.torch_private.fsdp import COLLECTIVES_MODULE

_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_ENGINE_FUNCTION = "torch.autograd.graph", "_engine_run_backward"

NOT_MODEL_CODE = (
    "torch.",
    "quaver.lab.recorder.",
    "quaver.lab.memory.",
    "quaver.kernels.operation",
    "quaver.runtime.phases",
    "quaver.torch_private.",
    "contextlib",
    "functools",
)
"""Prefixes of Python modules whose frames are skipped: they are not the model's code, or only call functions."""


class Caller(NamedTuple):
    """The place of an operator's call, and the frames of torch around it."""

    line: str
    """The file's path from its outermost package on, as "quaver/linear/module.py:123"; empty if unknown."""
    is_collective_buffer: bool
    """Whether the result is a buffer of a collective."""
    under_policy: bool
    """Whether a selective checkpoint called its policy for the operator."""


def allocate_collective_buffer(tensor: Tensor) -> Tensor:
    """Allocate a tensor of the same size for a simulated collective, which `find_caller` counts as communication."""
    return tensor.new_empty(tensor.shape)


_ALLOCATE_CODE = allocate_collective_buffer.__code__


def find_caller() -> Caller:
    """Return the call of the operator that is being dispatched."""
    is_collective_buffer = under_policy = False
    frame = sys._getframe(1)
    while frame is not None:
        name = get_module_name(frame)
        if name.startswith(NOT_MODEL_CODE):
            function = frame.f_code.co_name
            is_collective_buffer = is_collective_buffer or name == COLLECTIVES_MODULE or frame.f_code is _ALLOCATE_CODE
            under_policy = under_policy or (name == _CHECKPOINT_MODULE and function == "__torch_dispatch__")
            if (name, function) == _ENGINE_FUNCTION:
                break
        elif name:  # code that torch generates at runtime has no module name
            line = f"{shorten_path(frame.f_code.co_filename, name)}:{frame.f_lineno}"
            return Caller(line, is_collective_buffer, under_policy)
        frame = frame.f_back  # type: ignore[assignment]
    return Caller("", is_collective_buffer, under_policy)


def get_module_name(frame: FrameType) -> str:
    """Return the name of the Python module whose code a frame runs; "torch." for torch itself."""
    name = frame.f_globals.get("__name__", "")
    return "torch." if name == "torch" else str(name)


@cache
def shorten_path(file: str, module: str) -> str:
    """Return the end of the file's path that corresponds to its module's name, or the file name of a script."""
    path = Path(file)
    names = len(module.split(".")) + (path.stem == "__init__")
    return "/".join(path.parts[-names:])
