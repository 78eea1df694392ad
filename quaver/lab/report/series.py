"""The curves of a run: numbers of metrics.jsonl by step, thinned for a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_CURVE_COLUMNS = 750
"""Columns of a thinned curve. Each keeps its lowest and its highest point."""


@dataclass(frozen=True)
class Curve:
    """One number of one model of a run by step; values are finite."""

    model: str
    steps: list[int]
    values: list[float]


def collect_curves(records: Iterable[dict[str, Any]], key: str) -> list[Curve]:
    """Return the curve of each model that has the number `key` in a record."""
    by_model: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            steps, values = by_model.setdefault(str(record.get("model", "")), ([], []))
            steps.append(record["step"])
            values.append(float(value))
    return [Curve(model, steps, values) for model, (steps, values) in by_model.items()]


def thin_curve(curve: Curve) -> Curve:
    """Return `curve` reduced to its first, its last, and the lowest and highest points of each column."""
    indices = _find_extremes(curve.values, MAX_CURVE_COLUMNS)
    return Curve(curve.model, [curve.steps[index] for index in indices], [curve.values[index] for index in indices])


def _find_extremes(values: Sequence[float], columns: int) -> list[int]:
    if len(values) <= 2 * columns:
        return list(range(len(values)))
    array = np.array(values)
    edges = np.linspace(0, len(array), columns + 1).astype(int).tolist()
    spans = list(zip(edges, edges[1:], strict=False))
    extremes = [first + int(extreme(array[first:last])) for first, last in spans for extreme in (np.argmin, np.argmax)]
    return sorted({0, *extremes, len(array) - 1})
