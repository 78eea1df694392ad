"""Assumed results, for an estimate, of operators whose results depend on values.

A result whose size depends on values gets the largest possible size. An operator without a fake implementation has no
such bound: each of its results is assumed to be like its first tensor. Each assumption is noted with its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quaver.memory.faking.places import place_here

_aten = torch.ops.aten


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
    tensor = given["self"]
    counts = tensor.numel() if given["return_counts"] else 0
    inverse = tensor.shape if given["return_inverse"] else (0,)
    return tensor.new_empty(tensor.numel()), _numbers(tensor, inverse), _numbers(tensor, (counts,))


def _unique_dim(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    tensor, dim = given["self"], given["dim"]
    if dim is None:  # only unique_consecutive
        return _unique(given)
    counts = tensor.shape[dim] if given["return_counts"] else 0
    inverse = tensor.shape[dim] if given["return_inverse"] else 0
    return tensor.new_empty(tensor.shape), _numbers(tensor, (inverse,)), _numbers(tensor, (counts,))


def _numbers(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.int64)


_LARGEST = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_consecutive.default: _unique_dim,
}
