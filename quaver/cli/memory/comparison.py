"""What `quaver memory --vs` prints of two runs, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from quaver.memory.reports.compare import Comparison, Difference
from quaver.memory.reports.pitfalls import si

_TITLES = {
    "kept": "What differs of what is kept for the backward",
    "peak": "What differs of what is alive at the peaks",
}
_WIDTH = 11


def comparison_lines(comparison: Comparison, top: int = 8) -> Iterator[str]:
    """Yield the lines: both runs, and at most `top` rows of what each keeps and has alive."""
    yield from _runs(comparison)
    for moment, title in _TITLES.items():
        yield from ("", *_rows(title, comparison.at(moment), top))


def _runs(comparison: Comparison) -> Iterator[str]:
    runs = (
        ("first", comparison.label_a, comparison.peak_a, comparison.peak_at_a, comparison.kept_a),
        ("other", comparison.label_b, comparison.peak_b, comparison.peak_at_b, comparison.kept_b),
    )
    for name, label, peak, where, kept in runs:
        yield f"{name:<{_WIDTH}}{label}"
        yield f"{'':<{_WIDTH}}peak {_size(peak)}, in the {where}"
        yield f"{'':<{_WIDTH}}kept {_size(kept)}, by the first forward for its backward"
    more = (("peak", comparison.peak_b - comparison.peak_a), ("kept", comparison.kept_b - comparison.kept_a))
    yield f"{'more':<{_WIDTH}}" + ", ".join(f"{name} {size:+,} bytes" for name, size in more)


def _rows(title: str, rows: tuple[Difference, ...], top: int) -> Iterator[str]:
    if not rows:
        yield f"{title}: nothing"
        return
    yield f"{title}:"
    yield from (f"    {row.sentence}" for row in rows[:top])
    left = rows[top:]
    if left:
        yield f"    and {len(left)} more rows, {sum(row.difference_bytes for row in left):+,} bytes in all"


def _size(size_bytes: int) -> str:
    return f"{si(size_bytes)} ({size_bytes:,} bytes)"
