"""`ExpertsProbe`: what experts call to have their grouped matmuls observed while they train."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quaver.kernels.operands import Operands


class ExpertsProbe(Protocol):
    """Observes what one weight of experts computes with; numerics/probe.py implements it.

    Without a monitor experts have no probe, and none of these is called.
    """

    def clear(self) -> None:
        """Forget what was observed."""

    def operands(
        self, name: str, hp: Tensor | None, operands: Operands, ends: Tensor | None, groups: int, *, moved: bool
    ) -> None:
        """A cast: "input", "weight" or "grad_output".

        Args:
            hp: [rows, columns], what was cast; None for a weight that was quantized before.
            operands: with the rows of all groups.
            ends: where the groups of the operands end; None for weights, whose groups have as many rows each.
            moved: whether the rows of the operands came from other ranks, and are not those of `hp`.
        """

    def result(self, name: str, result: Tensor, ends: Tensor | None) -> None:
        """One of the three matmuls: "output" [T, N], "grad_input" [T, K] or "grad_weight", shaped as the weight.

        `ends`: where the groups of its rows end; None where all rows count.
        """
