"""The statistics in heat maps, with their scales and the direction in which a value gets worse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quaver.numerics.record import Float64Array

CellBytes = np.ndarray[Any, np.dtype[np.uint8]]

MISSING, BEST, WORST, INFINITE, NOT_A_NUMBER = 0, 1, 253, 254, 255
"""A cell is one byte, and a larger byte is a worse value, so cells are merged by their maximum.

0: no value. 1: an exact zero, or no error. 2 to 253: the scale from its best to its worst end, clamped at both.
254: infinite, or an SQNR of -inf. 255: NaN, or an operand with non-finite elements.
"""


@dataclass(frozen=True)
class Statistic:
    """A statistic of the record, and its scale."""

    name: str
    """Its key in the record."""
    title: str
    unit: str
    """The title and the unit as the page shows them."""
    format_value: Callable[[float], str]
    """Formats a value as text."""
    scale: str
    """The color scale: "linear", "log2" or "log10". A logarithmic scale marks zero by a separate byte."""
    bounds: tuple[float, float]
    """The widest range of the color scale, after `scale` is applied. The values of the runs narrow it."""
    is_low_worse: bool = False
    """Whether a lower value is worse."""

    def apply_scale(self, values: Float64Array) -> Float64Array:
        """Apply `scale` to `values`; 0 becomes -inf on a logarithmic scale."""
        function = {"linear": np.positive, "log2": np.log2, "log10": np.log10}[self.scale]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(function(values), dtype=np.float64)

    def invert_scale(self, scaled: float) -> float:
        """Invert `apply_scale`."""
        return {"linear": scaled, "log2": 2.0**scaled, "log10": 10.0**scaled}[self.scale]

    def find_limits(self, runs: Iterable[Float64Array]) -> tuple[float, float]:
        """Return the ends of one scale for the finite values of all `runs`; an empty interval is widened to 1."""
        finite = [scaled[np.isfinite(scaled)] for scaled in map(self.apply_scale, runs)]
        ranges = [(values.min(), values.max()) for values in finite if values.size]
        low, high = self.bounds
        if ranges:
            low, high = np.clip([min(low for low, _ in ranges), max(high for _, high in ranges)], low, high)
        return (float(low), float(high)) if high > low else (float(low) - 0.5, float(high) + 0.5)

    def encode(self, values: Float64Array, present: np.ndarray[Any, Any], limits: tuple[float, float]) -> CellBytes:
        """Return the byte of each value, in the shape of `values`; `MISSING` where `present` is false."""
        low, high = limits
        scaled = self.apply_scale(values)
        with np.errstate(invalid="ignore"):
            share = np.clip((scaled - low) / (high - low), 0, 1)
        badness = 1 - share if self.is_low_worse else share
        cells = np.full(values.shape, BEST, dtype=np.uint8)
        finite = np.isfinite(scaled)
        cells[finite] = 2 + np.round(badness[finite] * (WORST - 2)).astype(np.uint8)
        cells[scaled == (-np.inf if self.is_low_worse else np.inf)] = INFINITE
        cells[np.isnan(scaled)] = NOT_A_NUMBER
        cells[~present] = MISSING
        return cells

    def rank_badness(self, values: Float64Array) -> Float64Array:
        """Return numbers that order values from good to bad: NaN is the worst."""
        return np.where(np.isnan(values), np.inf, -values if self.is_low_worse else values)


def _format_decibels(value: float) -> str:
    return f"{value:.1f} dB"  # or "-inf dB"


def _format_share(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 1e-4 else f"{value:.2%}"


def _format_amax(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g} = 2^{np.log2(value):.1f}" if np.isfinite(value) else str(value)


STATISTICS = (
    Statistic("sqnr_db", "SQNR", "dB", _format_decibels, "linear", (-20.0, 60.0), is_low_worse=True),
    Statistic("underflow", "underflow", "share of nonzero elements", _format_share, "log10", (-7.0, 0.0)),
    Statistic("saturated", "saturation", "share of elements", _format_share, "log10", (-7.0, 0.0)),
    Statistic("amax", "amax", "powers of two", _format_amax, "log2", (-150.0, 128.0)),
)
