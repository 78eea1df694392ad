"""Protocols of expert parallelism, which sends rows to the ranks of their experts and back.

A grouped matmul and a module of experts call them; parallel/expert_parallel.py implements them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operands
from quaver.recipes.linear_casts import OperandCasts


class TokenExchange(Protocol):
    """The exchange of one routing. `dispatch`, `combine` and `quantize` are collectives."""

    ends: Tensor
    """int32 [E of this rank]: where the received rows of each expert end."""
    row_experts: Tensor
    """int64 [received rows]: the expert of each row, counted from this rank's first expert."""

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows, ordered by expert. Returns the rows of this rank's experts from all ranks."""

    def combine(self, rows: Tensor) -> Tensor:
        """Send rows back to their ranks. Rows without an expert are 0."""

    def quantize(self, hp: Tensor, casts: OperandCasts, *, row: bool, column: bool) -> Operands:
        """Return operands that are bit-identical to a cast of `dispatch(hp)`. Sends codes if possible."""


class TokenDispatcher(Protocol):
    """Makes the exchange of each routing, for experts that are split over ranks."""

    num_ranks: int
    num_experts: int
    """The number of experts on all ranks."""

    def __call__(self, tokens: Tensor, ends: Tensor, description: str) -> TokenExchange:
        """Make the exchange of pairs of a token and an expert. A collective.

        Args:
            tokens: [pairs, D], the tokens of this rank's pairs, including pairs without an expert.
            ends: int32 [E of all ranks]: where the pairs of each expert end, sorted by expert.
            description: a description of the call, on which the ranks must agree.
        """

    def describe_precision(self, experts: nn.Module) -> str:
        """Return a sentence for reports: in which precision training sends tokens and gradients to these experts."""

    def to_local(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, differentiably."""


def send_to_experts(rows: Tensor, exchange: TokenExchange) -> Tensor:
    """Run `TokenExchange.dispatch` on rows in high precision, differentiably. A collective, in the backward too."""
    return _ExchangeRows.apply(rows, exchange, True)


def send_back(rows: Tensor, exchange: TokenExchange) -> Tensor:
    """Run `TokenExchange.combine` on rows in high precision, differentiably. A collective, in the backward too."""
    return _ExchangeRows.apply(rows, exchange, False)


class _ExchangeRows(torch.autograd.Function):
    """Sends rows to the experts, or back from them. Gradients take the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange, to_experts: bool) -> Tensor:
        ctx.exchange, ctx.to_experts = exchange, to_experts
        return exchange.dispatch(rows) if to_experts else exchange.combine(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.exchange.combine(grad) if ctx.to_experts else ctx.exchange.dispatch(grad)), None, None
