"""Measures the numerics of a model's float8 matmuls while it trains; see monitoring.py."""

from quaver.numerics.extras import what_if
from quaver.numerics.logprob_mismatch import Difference, Mismatch, first_differences, mismatch
from quaver.numerics.monitoring import Monitor, monitor

__all__ = ["Difference", "Mismatch", "Monitor", "first_differences", "mismatch", "monitor", "what_if"]
