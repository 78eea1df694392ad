"""Operators whose results depend on values, which fake tensors lack: refused, or assumed for an estimate.

For an estimate, a result whose size depends on values gets the largest possible size. An operator without a fake
implementation has no such bound: each of its results is assumed to be like its first tensor. Errors and notes name the
operator and its place in the model's code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from quaver.recorder.callers import end_of_path

_aten = torch.ops.aten

_NOT_THE_MODELS = ("torch.", "quaver.memory.", "quaver.recorder.", "contextlib", "functools")
"""Prefixes of Python modules that are not the model's code."""


def refusal(error: Exception) -> NotImplementedError:
    """The error for an operator that fake tensors do not support."""
    place = _place(list(walk_tb(error.__traceback__)))
    operator = f"{error.args[0]} in {place}" if place else str(error.args[0])
    if isinstance(error, UnsupportedOperatorException):
        return NotImplementedError(
            f"expected operators with a fake implementation, got {operator}, which has none; give it one with "
            "torch.library.register_fake, or ask for an estimate"
        )
    return NotImplementedError(
        f"expected operators whose results have shapes that do not depend on values, got {operator}; memory can only "
        "be predicted without it, or as an estimate, with the largest possible result"
    )


def depends_on(places: Iterable[str], error: Exception | None = None) -> NotImplementedError:
    """The error for a step that allocates other sizes, or fails, with another integer in place of those read."""
    became = "other sizes for another integer" if error is None else f"an error ({' '.join(str(error).split())})"
    return NotImplementedError(
        f"expected sizes that do not depend on integers read from tensors, got {became} read in "
        f"{' and in '.join(sorted(places))}; memory can only be predicted without that"
    )


class Assumptions:
    """Results for operators, with a note for each.

    Attributes:
        notes: each assumption, and how often it was made.
    """

    def __init__(self) -> None:
        self.notes: dict[str, int] = {}

    def largest_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The largest possible results of `operator`; None if they have no bound."""
        bound = _LARGEST.get(operator)
        if bound is None:
            return None
        given = operator._schema.arguments
        named = {argument.name: value for argument, value in zip(given, args, strict=False)} | kwargs
        named = {argument.name: argument.default_value for argument in given if argument.has_default_value()} | named
        result = bound(named)
        sizes = [list(each.shape) for each in (result if isinstance(result, tuple) else (result,)) if each.numel()]
        self._note(f"{operator} gives its largest possible result, {' and '.join(map(str, sizes))}")
        return result

    def like_first_tensor(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results like the first tensor, for an operator without a fake; None if it returns anything but tensors."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        returns = operator._schema.returns
        if not tensors or any(str(each.type) != "Tensor" for each in returns):
            return None
        self._note(f"{operator}, which has no fake implementation, gives results like its first tensor")
        results = tuple(torch.empty_like(tensors[0]) for _ in returns)
        return results[0] if len(results) == 1 else results

    def _note(self, words: str) -> None:
        place = place_here()
        note = f"estimate: {words}" + (f", in {place}" if place else "")
        self.notes[note] = self.notes.get(note, 0) + 1


def _nonzero(given: dict[str, Any]) -> Tensor:
    tensor = given["self"]
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=tensor.device)


def _masked_select(given: dict[str, Any]) -> Tensor:
    shape = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)
    return given["self"].new_empty(shape.numel())


def _unique(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Values, inverse and counts; those that were not asked for are empty."""
    tensor, dim = given["self"], given.get("dim")
    whole = dim is None
    most = tensor.numel() if whole else tensor.shape[dim]
    inverse = (tensor.shape if whole else (most,)) if given["return_inverse"] else (0,)
    counts = (most,) if given["return_counts"] else (0,)
    values = tensor.new_empty((most,) if whole else tensor.shape)
    return values, tensor.new_empty(inverse, dtype=torch.int64), tensor.new_empty(counts, dtype=torch.int64)


_LARGEST = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique,
    _aten.unique_consecutive.default: _unique,
}


# ---- places ----------------------------------------------------------------------------------------------------------


def place_here() -> str:
    """The place of the calling code, as "module layers.0.router (model/moe.py:31)"; empty without a model's frame.

    An autograd node in C++ has no frame: code in backward has the place of the call of `backward`.
    """
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
