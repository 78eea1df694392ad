"""Measures the error of a GPU's accumulation beside that of the casts, from a few rows of both operands.

    casts     the products of the codes, summed exactly, beside those in high precision: what the casts lose
    fast      the hardware's sums of the same products beside exact ones, with fast accumulation
    exact     the same without it

Each is a signal-to-noise ratio. `SAMPLED` rows of the left operand meet as many columns of the right one, so that a
matmul costs `SAMPLED ** 2` dot products, whatever its size. Sums of ratios over micro-batches, calls and ranks are made
of `WIDTH` numbers each, which add up:

    signal of hp, noise of the casts, signal of the codes, noise of the sums with and without fast accumulation
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quaver.kernels.operands import Operand, present
from quaver.numerics.accumulation import Accumulation, accumulate, chains
from quaver.numerics.statistics import signal_and_noise, spread, sqnr_db
from quaver.recipes.formats import E5M2
from quaver.recipes.scaling import multiply_scale_

SAMPLED = 16
"""Rows of each operand: the noise of 256 sums is known to about 0.4 dB."""

WIDTH = 5

BFLOAT16_DB = 20 * math.log10(2**8)
"""The lowest SQNR that rounding a result to bfloat16 can have: sums that lose less cost nothing that counts."""


class Rows(NamedTuple):
    """Some rows of one operand, whose columns a matmul contracts."""

    hp: Tensor
    made: Operand
    """What they were cast to."""

    @property
    def codes(self) -> Tensor:
        """float8, [rows, K] as `hp`."""
        return self.made.data

    @property
    def dequant_scale(self) -> Tensor:
        """(), [rows, 1], or one a block of the contracted dim."""
        return present(self.made.dequant_scale)


def some_rows(hp: Tensor, made: Operand, direction: str) -> Rows:
    """`SAMPLED` rows, evenly spread, of a matrix that was cast; of its transpose where `direction` is "column"."""
    if direction == "column":
        hp, made = hp.t(), made.t()
    rows = spread(len(hp), SAMPLED, hp.device)
    return Rows(hp[rows], made.rows(rows))


class Sums(NamedTuple):
    """Decibels of one matmul; infinite without noise."""

    casts: float
    fast: float
    exact: float

    def used(self, use_fast_accum: bool) -> float:
        """The ratio of the hardware's sums with `use_fast_accum` as it is set."""
        return self.fast if use_fast_accum else self.exact

    def bound(self) -> float:
        """The lowest ratio that sums may have: that of the casts, or of the result's rounding to bfloat16."""
        return min(self.casts, BFLOAT16_DB)

    @classmethod
    def of(cls, values: Sequence[float]) -> Sums | None:
        """From `WIDTH` numbers; None of nothing."""
        hp, of_casts, codes, fast, exact = values
        if not hp or not codes:
            return None
        return cls(*sqnr_db(np.array([hp, codes, codes]), np.array([of_casts, fast, exact])).tolist())


@torch.no_grad()
def observe_sums(left: Rows, right: Rows, rule: Accumulation) -> Tensor:
    """The numbers of left @ right.t(), float64 [WIDTH]; zeros where the hardware does not multiply such scales."""
    found = torch.zeros(WIDTH, dtype=torch.float64, device=left.hp.device)
    sums = _hardware_sums(left, right, rule)
    if sums is not None:
        operands = (
            multiply_scale_(each.codes.double(), each.dequant_scale, each.made.layout) for each in (left, right)
        )
        of_codes = next(operands) @ next(operands).t()
        found[0], found[1] = signal_and_noise(left.hp.double() @ right.hp.double().t(), of_codes)
        found[2], found[3] = signal_and_noise(of_codes, sums[0])
        found[4] = signal_and_noise(of_codes, sums[1])[1]
    return found


def _hardware_sums(left: Rows, right: Rows, rule: Accumulation) -> tuple[Tensor, Tensor] | None:
    """The results with and without fast accumulation, which scales of blocks have not."""
    lengths = {_block_length(left), _block_length(right)}
    if lengths == {None}:
        scale = left.dequant_scale.double() * _transposed(right.dequant_scale.double())
        fast, exact = (accumulate(left.codes, right.codes, rule, use_fast_accum=is_fast) for is_fast in (True, False))
        return fast * scale, exact * scale
    is_e5m2 = E5M2.dtype in (left.codes.dtype, right.codes.dtype)
    if lengths != {rule.promoted_every} or is_e5m2:
        return None
    partials = chains(left.codes, right.codes, rule, rule.promoted_every)
    scaled = partials * (left.dequant_scale[:, None] * right.dequant_scale)
    total = torch.zeros_like(scaled[..., 0])
    for partial in scaled.unbind(2):
        total += partial
    return total, total


def _transposed(scale: Tensor) -> Tensor:
    return scale.t() if scale.dim() else scale


def _block_length(rows: Rows) -> int | None:
    """Columns that share a scale; None where all of a row do."""
    scale = rows.dequant_scale
    if scale.dim() == 0 or scale.shape[1] == 1:
        return None
    return rows.made.layout.columns
