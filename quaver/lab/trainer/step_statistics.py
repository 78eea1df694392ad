"""Statistics of a run's steps: spikes of the loss, and medians without the warm-up."""

import statistics
from collections.abc import Sequence

WARMUP_STEPS = 3
"""The first steps, which medians leave out: they compile, allocate and measure memory."""

SPIKE_WINDOW, SPIKE_MIN_STEPS = 64, 16
"""The largest and the smallest number of previous losses with which a loss is compared."""
MAD_TO_STD = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution: 1 / (sqrt(2) * erfinv(1 / 2))."""
MIN_RELATIVE_STD = 1e-3
"""A lower bound of the deviation, relative to the median: differences in the last digits are not spikes."""


def is_spike(loss: float, recent: Sequence[float], deviations: float) -> bool:
    """Return whether `loss` is more than `deviations` robust standard deviations above the median of `recent`.

    Median and median absolute deviation are robust: a spike in the window does not hide the next one. False with fewer
    than `SPIKE_MIN_STEPS` losses, or with `deviations` 0.
    """
    if not deviations or len(recent) < SPIKE_MIN_STEPS:
        return False
    median = statistics.median(recent)
    std = MAD_TO_STD * statistics.median(abs(past - median) for past in recent)
    return loss > median + deviations * max(std, MIN_RELATIVE_STD * abs(median))


def append_recent_loss(loss: float, recent: list[float]) -> None:
    """Append `loss` to `recent` and drop all but the last `SPIKE_WINDOW` losses."""
    recent.append(loss)
    del recent[:-SPIKE_WINDOW]


def compute_median_after_warmup(values: Sequence[float]) -> float:
    """Return the median of the values after the warm-up steps, or of all values if there are no more."""
    return statistics.median(values[WARMUP_STEPS:] or values)
