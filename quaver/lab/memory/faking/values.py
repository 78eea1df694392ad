"""Operators whose results depend on values, which fake tensors lack: refused, or assumed for an estimate.

For an estimate, a result whose size depends on values gets the largest possible size. An operator without a fake
implementation has no such bound: each of its results is assumed to be like its first tensor. Errors and notes name the
operator and its place in the model's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from quaver.lab.recorder.callers import NOT_THE_MODELS, end_of_path, module_of


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
        notes: each assumption once.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def largest_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The largest possible results of `operator`; None if they have no bound."""
        if operator not in _LARGEST:
            return None
        result = _LARGEST[operator](*args, **kwargs)
        self._note(f"{operator} gives its largest possible result, {list(result.shape)}")
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
        if note not in self.notes:
            self.notes.append(note)


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=tensor.device)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


_LARGEST: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
}


# ---- places ----------------------------------------------------------------------------------------------------------


def place_here() -> str:
    """The place of the calling code, as "module layers.0.router (model/moe.py:31)"; empty without a model's frame.

    An autograd node in C++ has no frame: code in backward has the place of the call of `backward`.
    """
    return _place(list(walk_stack(sys._getframe(1)))[::-1])


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """The place of these frames with their lines, outermost first."""
    outside = [(frame, line) for frame, line in frames if not module_of(frame).startswith(NOT_THE_MODELS)]
    if not outside:
        return ""
    frame, line = outside[-1]
    where = f"{end_of_path(frame.f_code.co_filename, module_of(frame))}:{line}"
    module = _module_name([each.f_locals.get("self") for each, _ in frames if each.f_code.co_name == "forward"])
    return f"module {module} ({where})" if module else where


def _module_name(owners: list[Any]) -> str:
    """The name of the innermost of these nested modules in the outermost; a root is named by its class."""
    modules = [each for each in owners if isinstance(each, nn.Module)]
    named = modules[0].named_modules() if modules else ()
    names = {id(each): name or type(each).__name__ for name, each in named}
    return next((names[id(each)] for each in reversed(modules) if id(each) in names), "")
