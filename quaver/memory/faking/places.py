"""Locates an error in a model's code: the innermost module, and the source line."""

from __future__ import annotations

import sys
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

from torch import nn

from quaver.recorder.callers import end_of_path

_NOT_THE_MODELS = ("torch.", "quaver.memory.", "quaver.recorder.", "contextlib", "functools")
"""Prefixes of Python modules that are not the model's code."""


def place_of(error: BaseException) -> str:
    """The place of `error`, as "module layers.0.router (model/moe.py:31)"; empty without a frame of a model.

    An autograd node in C++ has no frame: an error in backward has the place of the call of `backward`.
    """
    return _place(list(walk_tb(error.__traceback__)))


def place_here() -> str:
    """The place of the calling code."""
    return _place(list(walk_stack(sys._getframe(1)))[::-1])


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """The place of these frames with their lines, outermost first."""
    outside = [(frame, line) for frame, line in frames if not _name(frame).startswith(_NOT_THE_MODELS)]
    if not outside:
        return ""
    frame, line = outside[-1]
    where = f"{end_of_path(frame.f_code.co_filename, _name(frame))}:{line}"
    module = _module_name([each.f_locals.get("self") for each, _ in frames if each.f_code.co_name == "forward"])
    return f"module {module} ({where})" if module else where


def _module_name(owners: list[Any]) -> str:
    """The name of the innermost of these nested modules in the outermost; a root is named by its class."""
    modules = [each for each in owners if isinstance(each, nn.Module)]
    if not modules:
        return ""
    for module in reversed(modules):
        name = next((name for name, each in modules[0].named_modules() if each is module), None)
        if name is not None:
            return name or type(module).__name__
    return type(modules[-1]).__name__


def _name(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__", "")
    return "torch." if name == "torch" else str(name)
