"""The heat maps of a page: a byte per cell, the worst cells with their exact values, and histograms."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np

from quaver.lab.report.merge import MAX_MAP_CELLS, Grid, choose_grid
from quaver.lab.report.statistics import MISSING, NOT_A_NUMBER, STATISTICS, CellBytes, Statistic
from quaver.numerics.record import Record, encode_counts

MAX_WORST_CELLS = 25
"""Rows of the table of worst cells."""
MAX_WHATIF_ROWS = 500
"""Rows of the table of other recipes."""
SQNR_NAME = STATISTICS[0].name
MAX_HISTOGRAM_BYTES = 400_000
"""Limit on the counts of all histograms of a page; in base64 they take 0.5 MB."""

Limits = dict[str, tuple[float, float]]


def find_limits(records: Sequence[Record]) -> Limits:
    """Return the ends of the color scale of each statistic that a run has; they are the same for all runs."""
    limits = {}
    for statistic in STATISTICS:
        runs = [record.statistics[statistic.name] for record in records if statistic.name in record.statistics]
        if any((~np.isnan(run)).any() for run in runs):
            limits[statistic.name] = statistic.find_limits(runs)
    return limits


def make_maps(record: Record, alarms: Sequence[dict[str, Any]], limits: Limits, share: float = 1.0) -> dict[str, Any]:
    """Return the heat maps of a run, ready for JSON.

    Args:
        alarms: from `read_alarms`. The histograms of the steps at which they began are included.
        limits: from `find_limits` for all runs of the page.
        share: the run's share of the page's bytes.
    """
    shown = [statistic for statistic in STATISTICS if statistic.name in limits and statistic.name in record.statistics]
    kinds = [(tensor["operand"], tensor["cast"]) for tensor in record.tensors]
    grid = choose_grid(len(record.steps), kinds, len(shown), int(share * MAX_MAP_CELLS))
    steps, last = record.steps.tolist(), [end - 1 for end in grid.column_edges[1:]]
    return {
        "every": get_sampling_interval(record),
        "samples": len(steps),
        "tensors": _encode_tensors(record.tensors),
        "rows": None if len(grid.rows) == len(record.tensors) else grid.rows,
        "columns": [[steps[first] for first in grid.column_edges[:-1]], [steps[index] for index in last]],
        "maps": {
            statistic.name: _make_map(encode_statistic(record, statistic, limits[statistic.name]), grid)
            for statistic in shown
        },
        "worst": {statistic.name: find_worst_cells(record, statistic) for statistic in shown},
        "whatif": _make_whatif_table(record),
        "histograms": _list_histograms(record, alarms, int(share * MAX_HISTOGRAM_BYTES)),
    }


def _encode_tensors(tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each name once, and for each tensor the positions of its names."""
    names: dict[str, int] = {}

    def add_name(name: str) -> int:
        return names.setdefault(name, len(names))

    keys = ("layer", "operand", "cast")
    rows = [[*(add_name(tensor[key]) for key in keys), add_name(_describe_cast(tensor))] for tensor in tensors]
    return {"names": list(names), "rows": rows}


def _describe_cast(tensor: dict[str, Any]) -> str:
    """Describe a tensor's cast, such as "float8_e4m3fn blockwise 1x128"."""
    parts = (tensor.get(name) for name in ("dtype", "granularity", "block"))
    return " ".join(str(part) for part in parts if part not in (None, "none"))


def get_sampling_interval(record: Record) -> int:
    """Return the number of steps from one sample to the next, at least 1."""
    every = record.header.get("every")
    return every if isinstance(every, int) and every > 0 else 1


def encode_statistic(record: Record, statistic: Statistic, limits: tuple[float, float]) -> CellBytes:
    """Return the bytes of a statistic, [samples, tensors].

    A NaN means that the statistic does not apply, unless the operand has non-finite elements.
    """
    values = record.statistics[statistic.name]
    applies = ~np.isnan(values)
    cells = statistic.encode(values, applies, limits)
    if "nonfinite" in record.statistics:
        is_not_finite = record.statistics["nonfinite"] > 0
        cells[is_not_finite & applies.any(0) & (~applies | (statistic.name == "amax"))] = NOT_A_NUMBER
    return cells


def _make_map(sample_cells: CellBytes, grid: Grid) -> dict[str, Any]:
    """Return the rows that have a value, and their bytes row by row."""
    cells = grid.merge(sample_cells)
    rows = np.flatnonzero((cells != MISSING).any(1))
    return {"rows": rows.tolist(), "bytes": b64encode(np.ascontiguousarray(cells[rows]).tobytes()).decode()}


def find_worst_cells(record: Record, statistic: Statistic, max_cells: int = MAX_WORST_CELLS) -> list[list[Any]]:
    """Return the worst sample of each tensor, worst first: [tensor, step, the value as text]."""
    values = record.statistics[statistic.name]
    badness = np.where(np.isnan(values), -np.inf, statistic.rank_badness(values))
    cells = []
    for tensor in np.argsort(-badness.max(0), kind="stable").tolist():
        sample = badness[:, tensor].argmax()
        value = values[sample, tensor]
        if not np.isnan(value):
            cells.append([tensor, int(record.steps[sample]), statistic.format_value(value)])
    return cells[:max_cells]


def _make_whatif_table(record: Record) -> dict[str, Any]:
    """Return the SQNR in dB under other recipes: rows of [tensor, step, the run's, one per recipe], lowest first."""
    rows = []
    if record.whatif and SQNR_NAME in record.statistics:
        sqnr_db = np.stack(list(record.whatif.values()))
        is_measured = np.logical_or.reduce(~np.isnan(sqnr_db))
        for tensor in np.flatnonzero(is_measured.any(0)).tolist():
            sample = int(np.flatnonzero(is_measured[:, tensor])[-1])
            values = (record.statistics[SQNR_NAME][sample, tensor], *sqnr_db[:, sample, tensor])
            rows.append([tensor, int(record.steps[sample]), *map(_round_decibels, values)])
    rows.sort(key=lambda row: np.inf if row[2] is None else row[2])
    return {"recipes": list(record.whatif), "rows": rows[:MAX_WHATIF_ROWS]}


def _round_decibels(value: float) -> float | None:
    return round(float(value), 2) if np.isfinite(value) else None


def _list_histograms(record: Record, alarms: Sequence[dict[str, Any]], max_bytes: int) -> dict[str, Any]:
    """Return counts before and after the cast, for evenly spaced samples and where an alarm began.

    If the last sample exceeds the limit by itself, only the tensors with the lowest SQNR are included.
    """
    rows: list[list[Any]] = []
    if record.histograms and record.tensors:
        samples = sorted(record.histograms)
        bins = record.histograms[samples[-1]].before.shape[1]
        count = min(len(samples), max(1, max_bytes // (2 * bins * len(record.tensors))))
        evenly_spaced = {samples[round(index)] for index in np.linspace(len(samples) - 1, 0, count)}
        tensors = _find_worst_tensors(record, max(1, max_bytes // (2 * bins * len(evenly_spaced))))
        cells = {(sample, tensor) for sample in evenly_spaced for tensor in tensors}
        cells |= _find_alarm_histograms(record, samples, alarms)
        rows = [_encode_histogram(record, sample, tensor) for sample, tensor in sorted(cells)]
    return {"samples": len(record.histograms), "rows": [row for row in rows if row[3]]}


def _find_worst_tensors(record: Record, max_tensors: int) -> list[int]:
    if max_tensors >= len(record.tensors) or SQNR_NAME not in record.statistics:
        return list(range(min(max_tensors, len(record.tensors))))
    return [tensor for tensor, *_ in find_worst_cells(record, STATISTICS[0], max_tensors)]


def _find_alarm_histograms(
    record: Record, samples: list[int], alarms: Sequence[dict[str, Any]]
) -> set[tuple[int, int]]:
    """Return (sample, tensor) of the first histogram at or after each alarm's start, for every cast of its operand."""
    cells = set()
    for alarm in alarms:
        first = next((sample for sample in samples if record.steps[sample] >= alarm["since"]), samples[-1])
        cells |= {
            (first, position)
            for position, tensor in enumerate(record.tensors)
            if (tensor["layer"], tensor["operand"]) == (alarm["layer"], alarm["operand"])
        }
    return cells


def _encode_histogram(record: Record, sample: int, tensor: int) -> list[Any]:
    """Return [tensor, step, exponent of the first bin, counts before, counts after] without empty bins at the ends."""
    histogram, step = record.histograms[sample], int(record.steps[sample])
    before, after = (np.nan_to_num(counts[tensor]) for counts in (histogram.before, histogram.after))
    used = np.flatnonzero(before + after)
    if not used.size:
        return [tensor, step, 0, "", ""]
    used_bins = slice(int(used[0]), int(used[-1]) + 1)
    return [
        tensor,
        step,
        histogram.low + used_bins.start,
        *(encode_counts(counts[used_bins].tolist()) for counts in (before, after)),
    ]
