"""Notices a loss that stands out from those before it."""

import statistics
from collections.abc import Sequence

WINDOW = 64
"""Steps that a loss is compared with."""
LEAST = 16
"""Steps before there is anything to compare with."""
NORMAL_DEVIATION = 1.4826
"""Standard deviation over the median absolute deviation, of a normal distribution: 1 / (sqrt(2) * erfinv(1 / 2))."""
LEAST_RELATIVE_DEVIATION = 1e-3
"""A run whose losses hardly differ still has no spike in their last digits."""


def is_spike(loss: float, recent: Sequence[float], deviations: float) -> bool:
    """Whether `loss` is more than `deviations` robust standard deviations above the median of `recent`.

    Median and median absolute deviation, because a spike that is in the window must not hide the next one.
    False with fewer than `LEAST` losses, or with `deviations` 0.
    """
    if not deviations or len(recent) < LEAST:
        return False
    median = statistics.median(recent)
    spread = NORMAL_DEVIATION * statistics.median(abs(each - median) for each in recent)
    return loss > median + deviations * max(spread, LEAST_RELATIVE_DEVIATION * abs(median))


def remember(loss: float, recent: list[float]) -> None:
    """Add `loss` to `recent`, which keeps the last `WINDOW`."""
    recent.append(loss)
    del recent[:-WINDOW]
