"""Fits the timeline of a memory report to a picture: of neighbouring events the one with the most bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def column_maxima(timeline: Iterable[Iterable[float]], most: int, *, keep: Iterable[int] = ()) -> Array:
    """The rows of `timeline` to draw, in their order: all, or about `most` of them.

    Of more rows than `most`, each of `most` runs of neighbours gives the first one with its highest sum, so that the
    highest row of all is among them. The first and the last row and those in `keep` are, too.

    Args:
        timeline: rows of [event, microseconds, bytes of each category].
        keep: the indices of rows that must be there.
    Returns:
        float64 of [rows, columns of `timeline`]; bytes are exact up to 2^53.
    """
    rows = np.array(timeline, dtype=np.float64)
    if len(rows) <= most:
        return rows
    totals = rows[:, 2:].sum(1)
    edges = np.linspace(0, len(rows), most + 1).astype(int)
    highest = [int(first + totals[first:last].argmax()) for first, last in zip(edges, edges[1:], strict=False)]
    return rows[np.unique([0, *highest, *keep, len(rows) - 1])]
