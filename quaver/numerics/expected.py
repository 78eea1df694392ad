"""Bounds on the error of a correct cast to float8, with which alarms compare: decibels, and shares of elements.

A value in the normal range of a format with `m` mantissa bits is off by at most u = 2^-(m+1) of itself, one in the
subnormal range by at most h, half of the smallest subnormal. So for any tensor, without saturation,

    noise <= u^2 * signal + numel * (h * dequant_scale)^2                                               (1)

- `rounding_bound_db`: the first term alone, 20 log10(2^(m+1)): 24.1 dB for e4m3, 18.1 dB for e5m2. Gaussian tensors
  have 31.5 and 25.6. No distribution gets below it by rounding, so what does lost range: subnormals or saturation.
- `cast_bound_db`: both terms. Codes below it are no rounding of their tensor at this scale: a wrong layout, another
  tensor's scale, codes of older values.
- `underflow_at`: an outlier hides what it does to the rest, because it has most of the signal. The share of elements
  that become zero shows it. Of a density that is flat around zero, as a Gaussian's is, with standard deviation s, a
  share p = 0.8 h / s underflows, and its SQNR under the subnormals' grid is s^2 / (h^2 / 3) = 1.92 / p^2. The bulk
  has lost all that the format guarantees where that is `rounding_bound_db`: p = 8.6% for e4m3, 17% for e5m2.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from quaver.recipes.formats import Float8Format, format_of


@cache
def named_format(dtype: str | None) -> Float8Format | None:
    """The format with the name that a record has, "float8_e4m3fn"; None for high precision."""
    if dtype is None or not dtype.startswith("float8"):
        return None
    return format_of(getattr(torch, dtype))


def rounding_bound_db(fmt: Float8Format) -> float:
    """The lowest SQNR that rounding in the normal range can have."""
    return -20 * math.log10(fmt.max_relative_error)


def cast_bound_db(fmt: Float8Format, rms: float, dequant_scale: float) -> float:
    """The lowest SQNR of a correct cast with that largest dequant scale and without saturation; (1) above."""
    subnormal = fmt.smallest_subnormal / 2 * dequant_scale / rms if rms > 0 else math.inf
    return -10 * math.log10(fmt.max_relative_error**2 + subnormal**2) if math.isfinite(subnormal) else -math.inf


def underflow_at(sqnr_db: float) -> float:
    """The share of elements that underflow in a bulk whose SQNR is that."""
    return math.sqrt(1.92) * 10 ** (-sqnr_db / 20)


def bulk_db(underflow: float) -> float:
    """The SQNR of a bulk of which that share underflows: the inverse of `underflow_at`."""
    return 10 * math.log10(1.92) - 20 * math.log10(underflow) if underflow > 0 else math.inf


def result_db(left: float, right: float, cancelled: float) -> float:
    """The SQNR of a matmul whose operands have `left` and `right`, with independent errors.

    `cancelled` is the mean square of a result over that of products which add at random: a sum that cancels keeps the
    noise of its terms.
    """
    noise = 10 ** (-left / 10) + 10 ** (-right / 10)
    return -10 * math.log10(noise / cancelled) if noise > 0 and cancelled > 0 else math.inf
