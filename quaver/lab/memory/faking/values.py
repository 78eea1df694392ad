"""Operators whose results depend on values, which fake tensors do not have. They raise, or an estimate assumes results.

In an estimate, a result whose size depends on values gets the largest possible size. For an operator without a fake
implementation no bound is known: each of its results is assumed to have the shape and dtype of its first tensor. Errors
and notes name the operator and its location in the model's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from quaver.lab.recorder.callers import NOT_MODEL_CODE, get_module_name, shorten_path
from quaver.torch_private.tracing import UnsupportedOperatorException


def make_unsupported_error(error: Exception) -> NotImplementedError:
    """Return the error for an operator that fake tensors do not support."""
    location = _describe_location(list(walk_tb(error.__traceback__)))
    operator = f"{error.args[0]} in {location}" if location else str(error.args[0])
    if isinstance(error, UnsupportedOperatorException):
        return NotImplementedError(
            f"expected operators with a fake implementation, got {operator}, which has none; give it one with "
            "torch.library.register_fake, or ask for an estimate"
        )
    return NotImplementedError(
        f"expected operators whose results have shapes that do not depend on values, got {operator}; memory can only "
        "be predicted without it, or as an estimate, with the largest possible result"
    )


def make_dependence_error(locations: Iterable[str], error: Exception | None = None) -> NotImplementedError:
    """Return the error for a step whose sizes change, or that fails, if an integer that it reads is different."""
    outcome = "other sizes for another integer" if error is None else f"an error ({' '.join(str(error).split())})"
    return NotImplementedError(
        f"expected sizes that do not depend on integers read from tensors, got {outcome} read in "
        f"{' and in '.join(sorted(locations))}; memory can only be predicted without that"
    )


class Assumptions:
    """Assumes the results of operators for an estimate."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """The assumptions, without duplicates."""

    def make_largest_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the largest possible results of `operator`, or None if no bound is known."""
        if operator not in _LARGEST_RESULTS:
            return None
        result = _LARGEST_RESULTS[operator](*args, **kwargs)
        self._note(f"{operator} gives its largest possible result, {list(result.shape)}")
        return result

    def make_like_first_tensor(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results like the first tensor, for an operator without a fake implementation.

        None if the operator takes no tensor or returns anything but tensors.
        """
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        returns = operator._schema.returns
        if not tensors or any(str(returned.type) != "Tensor" for returned in returns):
            return None
        self._note(f"{operator}, which has no fake implementation, gives results like its first tensor")
        results = tuple(torch.empty_like(tensors[0]) for _ in returns)
        return results[0] if len(results) == 1 else results

    def _note(self, assumption: str) -> None:
        location = describe_caller()
        note = f"estimate: {assumption}" + (f", in {location}" if location else "")
        if note not in self.notes:
            self.notes.append(note)


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=tensor.device)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


_LARGEST_RESULTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
}


def describe_caller() -> str:
    """Return the location of the calling code, as "module layers.0.router (model/moe.py:31)".

    It is empty if no frame is the model's. An autograd node in C++ has no frame, so the location of code in backward is
    the call of `backward`.
    """
    return _describe_location(list(walk_stack(sys._getframe(1)))[::-1])


def _describe_location(frames: list[tuple[FrameType, int]]) -> str:
    model_frames = [(frame, line) for frame, line in frames if not get_module_name(frame).startswith(NOT_MODEL_CODE)]
    if not model_frames:
        return ""
    innermost, line = model_frames[-1]
    source = f"{shorten_path(innermost.f_code.co_filename, get_module_name(innermost))}:{line}"
    module = _name_module([frame.f_locals.get("self") for frame, _ in frames if frame.f_code.co_name == "forward"])
    return f"module {module} ({source})" if module else source


def _name_module(owners: list[Any]) -> str:
    """Return the name of the innermost module of `owners` in the outermost. The outermost is named by its class."""
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    named = modules[0].named_modules() if modules else ()
    names = {id(module): name or type(module).__name__ for name, module in named}
    return next((names[id(module)] for module in reversed(modules) if id(module) in names), "")
