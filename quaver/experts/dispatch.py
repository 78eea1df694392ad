"""Protocols of expert parallelism: rows travel to the ranks of their experts, and back.

parallel/expert_parallel.py has the exchange. Here is what a grouped matmul and a module of experts call.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operands
from quaver.recipes.linear_casts import OperandCasts


class Dispatch(Protocol):
    """The exchange of one routing. `dispatch`, `combine` and `quantize` are collectives."""

    ends: Tensor
    """int32 [E of this rank]: where the rows of each of its experts end, once they are here."""
    experts: Tensor
    """int64 [rows here]: the expert of each row, among those of this rank."""

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows in the order of all experts -> the rows of this rank's experts, from all ranks."""

    def combine(self, rows: Tensor) -> Tensor:
        """The way back; rows of no expert are 0."""

    def quantize(self, hp: Tensor, casts: OperandCasts, row: bool, column: bool) -> Operands:
        """The operands of `dispatch(hp)`, to the bit; codes travel where they can."""


class Dispatcher(Protocol):
    """Makes the exchange of each routing, for experts that are split over ranks."""

    ranks: int
    """Over how many."""
    experts: int
    """How many all ranks have."""

    def __call__(self, pairs: int, ends: Tensor, call: str) -> Dispatch:
        """The exchange of pairs of tokens and experts. A collective.

        Args:
            pairs: how many this rank has, with those of no expert.
            ends: int32 [E of all ranks]: where the pairs of each expert end, sorted by expert.
            call: what the ranks must agree about.
        """

    def note(self, experts: nn.Module) -> str:
        """A sentence for reports: the precision in which tokens and gradients travel to these experts in training."""

    def local_part(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, differentiably."""


class Bring(torch.autograd.Function):
    """`dispatch.dispatch` in high precision, both ways."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.dispatch(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.combine(grad), None


class Combine(torch.autograd.Function):
    """`dispatch.combine` in high precision, both ways: for results that more than a matmul reads."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.combine(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.dispatch(grad), None
