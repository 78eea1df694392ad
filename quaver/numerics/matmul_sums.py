"""Compares the error of a GPU's accumulation with the error of the casts, from a few rows of both operands.

    casts     exact sums of the codes' products, compared with high precision: the error of the casts
    fast      the GPU's sums with fast accumulation, compared with exact sums of the same products
    exact     the GPU's sums without fast accumulation, compared with the same

Each is a signal-to-noise ratio. `SAMPLED_ROWS` rows of the left operand meet `SAMPLED_ROWS` columns of the right
operand, so a matmul of any size costs `SAMPLED_ROWS ** 2` dot products. The ratios follow from `SUMS_WIDTH` numbers,
which add up over microbatches, calls and ranks:

    signal of hp, noise of the casts, signal of the codes, noise of the sums with and without fast accumulation
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quaver.kernels.operands import Operand, require
from quaver.numerics.accumulation import Accumulation, accumulate, accumulate_chains
from quaver.numerics.statistics import compute_ratio_db, spread_indices, sum_signal_and_noise
from quaver.recipes.formats import E5M2
from quaver.recipes.scaling import multiply_scale_

SAMPLED_ROWS = 16
"""Rows of each operand: the noise of 256 sums is known to about 0.4 dB."""

SUMS_WIDTH = 5

BFLOAT16_DB = 20 * math.log10(2**8)
"""The lowest SQNR of a result's rounding to bfloat16. Sums with a smaller error do not matter."""


class SampledRows(NamedTuple):
    """Some rows of one operand and of its cast. The matmul contracts their columns."""

    hp: Tensor
    cast: Operand

    @property
    def codes(self) -> Tensor:
        """float8, [rows, K] as `hp`."""
        return self.cast.data

    @property
    def dequant_scale(self) -> Tensor:
        """float32 (), [rows, 1] or [rows, blocks of the contracted dim]."""
        return require(self.cast.dequant_scale, "the dequant_scale")


def sample_rows(hp: Tensor, cast: Operand, direction: str) -> SampledRows:
    """Take evenly spread rows of a matrix and its cast, or of their transposes if `direction` is "column"."""
    if direction == "column":
        hp, cast = hp.t(), cast.t()
    rows = spread_indices(len(hp), SAMPLED_ROWS, hp.device)
    return SampledRows(hp[rows], cast.select_rows(rows))


class MatmulSqnrs(NamedTuple):
    """SQNRs of one matmul in dB; infinite without noise."""

    casts: float
    fast: float
    exact: float

    def choose_sums_db(self, *, use_fast_accum: bool) -> float:
        """Return the SQNR of the GPU's sums with this setting of `use_fast_accum`."""
        return self.fast if use_fast_accum else self.exact

    def compute_bound_db(self) -> float:
        """Return the lowest acceptable SQNR of sums: the lower one of the casts and of rounding to bfloat16."""
        return min(self.casts, BFLOAT16_DB)

    @classmethod
    def from_values(cls, values: Sequence[float]) -> MatmulSqnrs | None:
        """Compute the ratios from `SUMS_WIDTH` numbers. None if nothing was observed."""
        hp_signal, casts_noise, codes_signal, *sums_noise = values
        if not hp_signal or not codes_signal:
            return None
        signal, noise = np.array([hp_signal, codes_signal, codes_signal]), np.array([casts_noise, *sums_noise])
        return cls(*compute_ratio_db(signal, noise).tolist())


@torch.no_grad()
def observe_sums(left: SampledRows, right: SampledRows, accumulation: Accumulation) -> Tensor:
    """Return the numbers of left @ right.t(), float64 [SUMS_WIDTH]. Zeros if the GPU does not multiply such scales."""
    values = torch.zeros(SUMS_WIDTH, dtype=torch.float64, device=left.hp.device)
    sums = _emulate_sums(left, right, accumulation)
    if sums is not None:
        a, b = (multiply_scale_(rows.codes.double(), rows.dequant_scale, rows.cast.layout) for rows in (left, right))
        exact = a @ b.t()
        values[0], values[1] = sum_signal_and_noise(left.hp.double() @ right.hp.double().t(), exact)
        values[2], values[3] = sum_signal_and_noise(exact, sums[0])
        values[4] = sum_signal_and_noise(exact, sums[1])[1]
    return values


def _emulate_sums(left: SampledRows, right: SampledRows, accumulation: Accumulation) -> tuple[Tensor, Tensor] | None:
    """Return the results with and without fast accumulation, or None if the GPU does not multiply such scales.

    With block scales both results are the same.
    """
    lengths = {_get_block_length(left), _get_block_length(right)}
    if lengths == {None}:
        scale = left.dequant_scale.double() * right.dequant_scale.double().t()
        fast, exact = (
            accumulate(left.codes, right.codes, accumulation, use_fast_accum=is_fast) for is_fast in (True, False)
        )
        return fast * scale, exact * scale
    is_e5m2 = E5M2.dtype in (left.codes.dtype, right.codes.dtype)
    if lengths != {accumulation.products_per_chain} or is_e5m2:
        return None
    partials = accumulate_chains(left.codes, right.codes, accumulation, accumulation.products_per_chain)
    scaled = partials * (left.dequant_scale[:, None] * right.dequant_scale)
    total = torch.zeros_like(scaled[..., 0])
    for partial in scaled.unbind(2):
        total += partial
    return total, total


def _get_block_length(rows: SampledRows) -> int | None:
    """Return how many columns share a scale; None if all columns of a row do."""
    scale = rows.dequant_scale
    if scale.dim() == 0 or scale.shape[1] == 1:
        return None
    return rows.cast.layout.columns
