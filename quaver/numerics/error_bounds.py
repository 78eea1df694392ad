"""Bounds on the error of a correct float8 cast, with which alarms compare it: in decibels, and in shares of elements.

In a format with `m` mantissa bits, rounding changes a normal value by at most u = 2^-(m+1) of the value. It changes a
subnormal value by at most h, half of the smallest subnormal. Without saturation, any tensor therefore satisfies

    noise <= u^2 * signal + numel * (h * dequant_scale)^2                                               (1)

- `compute_rounding_bound_db`: the first term only, 20 log10(2^(m+1)): 24.1 dB for e4m3, 18.1 dB for e5m2. Gaussian
  tensors have 31.5 and 25.6. Rounding of normal values never gets below it; subnormals or saturation do.
- `compute_cast_bound_db`: both terms. Codes below it are not a rounding of their tensor at this scale: the layout is
  wrong, or the scale or the codes belong to another tensor.
- `compute_underflow_share`: an outlier has most of the signal, so the SQNR hides what its scale does to the other
  elements. The share of elements that become zero shows it. If their density is flat around zero, like a Gaussian's,
  with standard deviation s, a share p = 0.8 h / s underflows. Their SQNR on the subnormals' grid is s^2 / (h^2 / 3) =
  1.92 / p^2. It reaches `compute_rounding_bound_db`, the format's guarantee, at p = 8.7% for e4m3 and 17% for e5m2.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from quaver.recipes.formats import Float8Format, get_format


@cache
def parse_format(dtype: str | None) -> Float8Format | None:
    """Return the format that a record calls "float8_e4m3fn", for example; None for high precision."""
    if dtype is None or not dtype.startswith("float8"):
        return None
    return get_format(getattr(torch, dtype))


def compute_rounding_bound_db(fmt: Float8Format) -> float:
    """Compute the lowest SQNR of rounding, if all values are in the normal range."""
    return -20 * math.log10(fmt.max_relative_error)


def compute_cast_bound_db(fmt: Float8Format, rms: float, dequant_scale: float) -> float:
    """Compute the lowest SQNR of a correct cast without saturation, by (1) above.

    `rms` is the tensor's, and `dequant_scale` is the largest of its scales.
    """
    subnormal = fmt.smallest_subnormal / 2 * dequant_scale / rms if rms > 0 else math.inf
    return -10 * math.log10(fmt.max_relative_error**2 + subnormal**2) if math.isfinite(subnormal) else -math.inf


def compute_underflow_share(sqnr_db: float) -> float:
    """Compute the share of elements that underflow if the elements besides outliers have this SQNR."""
    return math.sqrt(1.92) * 10 ** (-sqnr_db / 20)


def compute_bulk_db(underflow: float) -> float:
    """Compute the SQNR of the elements besides outliers if this share underflows: inverts `compute_underflow_share`."""
    return 10 * math.log10(1.92) - 20 * math.log10(underflow) if underflow > 0 else math.inf


def compute_result_db(left_db: float, right_db: float, uncancelled: float) -> float:
    """Compute the SQNR of a matmul whose operands have SQNRs `left_db` and `right_db` and independent errors.

    `uncancelled` is the mean square of the result, divided by its value if the products added at random: a sum that
    cancels keeps the noise of its terms.
    """
    noise = 10 ** (-left_db / 10) + 10 ** (-right_db / 10)
    return -10 * math.log10(noise / uncancelled) if noise > 0 and uncancelled > 0 else math.inf
