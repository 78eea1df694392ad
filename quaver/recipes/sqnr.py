"""Measures quantization noise: the signal to quantization noise ratio (SQNR) in decibels."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def compute_sqnr_db(exact: Tensor, rounded: Tensor) -> float:
    """Return the signal to quantization noise ratio, 20 log10(norm(exact) / norm(exact - rounded)); inf if equal."""
    exact = exact.detach().double()
    return to_decibels(exact.norm().item(), (exact - rounded.detach().double()).norm().item())


def to_decibels(signal: float, noise: float) -> float:
    """Return 20 log10(signal / noise) of two norms: inf for zero noise, -inf for zero signal or non-finite noise."""
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def replace_inf(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite decibels, such as the SQNR of exact codes, by None for JSON."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
