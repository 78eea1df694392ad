"""Draws a run's curves and its heat map of one statistic: the pictures of docs/experiments/alarms.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap

from quaver.lab.figure import open_figure
from quaver.lab.report.facts import select_memory_curves
from quaver.lab.report.maps import Limits, encode_statistic, find_limits, get_sampling_interval
from quaver.lab.report.merge import choose_grid
from quaver.lab.report.palette import SPECIAL_COLORS, make_palette
from quaver.lab.report.run import RunData
from quaver.lab.report.series import collect_curves, thin_curve
from quaver.lab.report.statistics import BEST, MISSING, WORST, Statistic
from quaver.numerics.record import Record

_LINES = ("#0b5cad", "#c2410c", "#11773f", "#7a3e9d", "#8a6d00", "#5b6470")
_MAX_ROWS, _MAX_COLUMNS = 400, 1000
"""Limits on the cells of a heat map, about its size in pixels."""
_MAX_LABELS = 30
_NONE = "#f5f7f9"
_COLORS = ListedColormap(
    [_NONE, SPECIAL_COLORS["light"][0], *reversed(make_palette(WORST - 1)), *SPECIAL_COLORS["light"][1:]]
)


def draw_run(image: Path, run: RunData, statistic: Statistic) -> None:
    """Write a PNG of a run that has statistics."""
    with open_figure(image, (12, 6), title=run.label) as figure:
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.0, 1.3])
        _draw_curves(list(top.subplots(1, 4)), run)
        _draw_map(bottom.subplots(), run, statistic)


def _draw_curves(axes: list[Any], run: RunData) -> None:
    panels = (
        ("Loss (nats per token)", collect_curves(run.records, "loss"), 1),
        ("Gradient norm", collect_curves(run.records, "grad_norm"), 1),
        ("Tokens per second", collect_curves(run.records, "tokens_per_s"), 1),
        ("Memory (GiB)", select_memory_curves(run)[1], 2**30),
    )
    for axis, (title, series, unit) in zip(axes, panels, strict=True):
        for curve, color in zip(map(thin_curve, series), _LINES, strict=False):
            axis.plot(curve.steps, np.array(curve.values) / unit, color=color, linewidth=0.9)
        for alarm in run.alarms:
            axis.axvline(alarm["since"], color="#b3261e", linewidth=0.8, linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("step")
        if not title.startswith(("Loss", "Gradient")):
            axis.set_ylim(0, 1.1 * max((max(curve.values) for curve in series), default=1) / unit)


def _draw_map(axis: Any, run: RunData, statistic: Statistic) -> None:
    axis.set_title(f"{statistic.title} ({statistic.unit})")
    record = run.numerics
    assert record is not None
    limits = find_limits([record])
    cells, edges, names, row_of_tensor = _make_cells(record, statistic, limits)
    rows = np.arange(len(cells) + 1) - 0.5
    axis.pcolormesh(edges, rows, cells, cmap=_COLORS, vmin=0, vmax=255, rasterized=True)
    axis.invert_yaxis()
    shown = range(0, len(names), -(-len(names) // _MAX_LABELS))
    axis.set_yticks(list(shown), [names[at] for at in shown], fontsize=6, parse_math=False)
    axis.set_xlabel("step")
    for alarm in run.alarms:
        row = row_of_tensor.get((alarm["layer"], alarm["operand"]))
        if row is not None:
            axis.plot(alarm["since"], row, "^", color="#b3261e", markeredgecolor="white", markersize=7)
    _draw_scale(axis, statistic, limits[statistic.name])


def _make_cells(
    record: Record, statistic: Statistic, limits: Limits
) -> tuple[Any, list[int], list[str], dict[tuple[str, str], int]]:
    """Return the cells of the heat map, the steps at its columns' edges, the names of its rows, and the row of each
    layer and operand. Rows without values are left out."""
    codes = encode_statistic(record, statistic, limits[statistic.name])
    has_value = np.flatnonzero((codes != MISSING).any(0)).tolist()
    tensors = [record.tensors[at] for at in has_value]
    kinds = [(tensor["operand"], tensor["cast"]) for tensor in tensors]
    grid = choose_grid(len(record.steps), kinds, 1, _MAX_ROWS * _MAX_COLUMNS)
    names = [f"{tensors[row[0]]['layer']} {tensors[row[0]]['operand'].replace('_', ' ')}" for row in grid.rows]
    row_of_tensor: dict[tuple[str, str], int] = {}
    for at, row in enumerate(grid.rows):
        for tensor in row:
            row_of_tensor.setdefault((tensors[tensor]["layer"], tensors[tensor]["operand"]), at)
    steps = record.steps.tolist()
    edges = [*(steps[first] for first in grid.column_edges[:-1]), steps[-1] + get_sampling_interval(record)]
    return grid.merge(codes[:, has_value]), edges, names, row_of_tensor


def _draw_scale(axis: Any, statistic: Statistic, limits: tuple[float, float]) -> None:
    """Draw the color bar, with the limits of the statistic at its ends."""
    bar = axis.figure.colorbar(axis.collections[0], ax=axis, boundaries=np.arange(BEST + 1, WORST + 2), fraction=0.05)
    ends = [statistic.format_value(statistic.invert_scale(end)) for end in limits]
    bar.set_ticks([BEST + 1, WORST], labels=reversed(ends) if statistic.is_low_worse else ends, fontsize=7)
