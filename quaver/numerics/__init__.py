"""Measures the numerics of a model's float8 matmuls while it trains; see monitoring.py."""

from quaver.numerics.extras import compute_what_if
from quaver.numerics.logprob_mismatch import Difference, Mismatch, compute_mismatch, find_first_differences
from quaver.numerics.monitoring import Monitor, monitor

__all__ = [
    "Difference",
    "Mismatch",
    "Monitor",
    "compute_mismatch",
    "compute_what_if",
    "find_first_differences",
    "monitor",
]
