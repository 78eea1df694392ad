"""Measures the numerics of a model's float8 matmuls while it trains.

measure    monitoring.py attaches a probe to each weight (probe.py), which adds to tallies (observe.py, statistics.py)
write      rank_statistics.py merges the tallies of all ranks, and sample_writer.py writes lines of a record (record.py)
judge      alarm_sink.py gives each sample (history.py) to alarms.py, which applies alarm_rules.py
"""

from quaver.numerics.extra_statistics import compute_what_if
from quaver.numerics.layer_differences import Difference, find_first_differences
from quaver.numerics.logprob_mismatch import Mismatch, compute_mismatch
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
