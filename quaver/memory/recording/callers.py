"""Finds the line of code that called an operator, from inside of the operator's dispatch.

Python's frames lead from the dispatch outwards: torch's own come first, then the line that is looked for. On the way
stand those who called it on someone else's behalf: FSDP2's collectives, a selective checkpoint. A node of autograd that
C++ runs has no line of its own; the call of `backward` ends the search.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_BACKEND = "quaver.memory.faking.gloo_buffers", "copy_of"
"""Who allocates what FSDP2, and a backend that is pretended, sends and receives."""

_CHECKPOINT = "torch.utils.checkpoint"
_ENGINE = "torch.autograd.graph", "_engine_run_backward"
_PASSED_OVER = ("torch.", "quaver.memory.", "contextlib", "functools")


class Caller(NamedTuple):
    """Who called an operator."""

    line: str
    """As "quaver/linear.py:123", the file's path from its outermost package on; empty where there is none."""
    communicates: bool
    """Whether it was called to send or to receive."""
    under_policy: bool
    """Whether a selective checkpoint's policy was asked about it."""


def caller() -> Caller:
    """Who called the operator that is being dispatched."""
    communicates = under_policy = False
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PASSED_OVER):
            function = frame.f_code.co_name
            communicates = communicates or name == _COLLECTIVES or (name, function) == _BACKEND
            under_policy = under_policy or (name == _CHECKPOINT and function == "__torch_dispatch__")
            if (name, function) == _ENGINE:
                break
        elif name not in ("", "torch"):  # code that torch writes as it runs has no name
            line = f"{_path(frame.f_code.co_filename, name)}:{frame.f_lineno}"
            return Caller(line, communicates, under_policy)
        frame = frame.f_back  # type: ignore[assignment]
    return Caller("", communicates, under_policy)


@cache
def _path(file: str, module: str) -> str:
    """The end of the file's path that its module's name stands for; of a script, its name."""
    path = Path(file)
    names = len(module.split(".")) + (path.stem == "__init__")
    return "/".join(path.parts[-names:])
