"""Refuses second derivatives of a linear: its casts to float8 are steps, and what their derivatives are nobody said."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_REFUSAL = (
    "a Float8Linear has no second derivative: its casts to float8 are steps. "
    "Call convert_to_high_precision(model) before double backward"
)


def refuse_double_backward(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """`grads` of a backward that is itself recorded; to differentiate them raises RuntimeError and says why."""
    return _RefuseDoubleBackward.apply(*(g if g is None else g.detach().requires_grad_() for g in grads))


class _RefuseDoubleBackward(torch.autograd.Function):
    """Identity."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor) -> None:
        raise RuntimeError(_REFUSAL)
