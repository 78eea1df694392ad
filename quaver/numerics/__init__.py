"""Measures the numerics of a model's float8 matmuls while it trains; see monitor.py."""

from quaver.numerics.extras import what_if
from quaver.numerics.mismatch import Difference, Mismatch, first_differences, mismatch
from quaver.numerics.monitor import Monitor, monitor

__all__ = ["Difference", "Mismatch", "Monitor", "first_differences", "mismatch", "monitor", "what_if"]
