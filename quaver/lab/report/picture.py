"""Draws the report of runs as one picture, for those without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap

from quaver.lab.recorder.figure import figure_of
from quaver.lab.report.facts import memory_curves
from quaver.lab.report.maps import Limits, codes_of, every_of, limits_of
from quaver.lab.report.merge import grid_of
from quaver.lab.report.palette import SPECIAL, palette
from quaver.lab.report.run import RunData
from quaver.lab.report.series import Curve, curves, thinned
from quaver.lab.report.statistics import BEST, MISSING, STATISTICS, WORST, Statistic
from quaver.numerics.record import Record

_LINES = ("#0b5cad", "#c2410c", "#11773f", "#7a3e9d", "#8a6d00", "#5b6470")
_MOST_ROWS, _MOST_COLUMNS = 400, 1000
"""Limits on the cells of a heat map: about the pixels that it gets."""
_MOST_LABELS = 30
_NONE = "#f5f7f9"
_COLORS = ListedColormap([_NONE, SPECIAL["light"][0], *reversed(palette(WORST - 1)), *SPECIAL["light"][1:]])


def draw_report(image: Path, runs: Sequence[RunData]) -> None:
    """Write a PNG: the curves of all runs, and the heat maps of each run that has statistics.

    Raises:
        OSError: `image` cannot be written.
    """
    measured = [run for run in runs if run.numerics]
    limits = limits_of([run.numerics for run in measured if run.numerics])
    shown = [each for each in STATISTICS if each.name in limits]
    image.parent.mkdir(parents=True, exist_ok=True)
    title = " and ".join(run.label for run in runs)
    with figure_of(image, (max(12, 8 * len(measured)), 2.6 + 3.4 * len(shown)), title=title) as figure:
        ratios = [1.0, *[1.3] * len(shown)]
        top, *parts = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
        _draw_curves(list(top.subplots(1, 4)), runs)
        for statistic, part in zip(shown, parts, strict=True):
            axes = part.subplots(1, len(measured), squeeze=False)
            for axis, run in zip(axes[0], measured, strict=True):
                _draw_map(axis, run, statistic, limits)


def _draw_curves(axes: list[Any], runs: Sequence[RunData]) -> None:
    panels = (
        ("Loss (nats per token)", lambda run: curves(run.records, "loss"), 1),
        ("Gradient norm", lambda run: curves(run.records, "grad_norm"), 1),
        ("Tokens per second", lambda run: curves(run.records, "tokens_per_s"), 1),
        ("Memory (GiB)", lambda run: memory_curves(run)[1], 2**30),
    )
    for axis, (title, read, unit) in zip(axes, panels, strict=True):
        found = [(_label(runs, run, curve), thinned(curve)) for run in runs for curve in read(run)]
        for (label, curve), color in zip(found, [*_LINES] * len(found), strict=False):
            axis.plot(curve.steps, np.array(curve.values) / unit, color=color, linewidth=0.9, label=label)
        for run in runs:
            for alarm in run.alarms:
                axis.axvline(alarm["since"], color="#b3261e", linewidth=0.8, linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("step")
        if not title.startswith(("Loss", "Gradient")):
            axis.set_ylim(0, 1.1 * max((max(curve.values) for _, curve in found), default=1) / unit)
        if len(found) > 1:
            axis.legend(fontsize=7)


def _label(runs: Sequence[RunData], run: RunData, curve: Curve) -> str:
    return " ".join(([run.label] if len(runs) > 1 else []) + ([curve.model] if len(run.models) > 1 else [])) or "run"


def _draw_map(axis: Any, run: RunData, statistic: Statistic, limits: Limits) -> None:
    axis.set_title(f"{statistic.title} ({statistic.unit}) of {run.label}", parse_math=False)
    record = run.numerics
    if record is None or statistic.name not in record.statistics:
        axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)
        return
    cells, edges, names, row_of_tensor = _cells(record, statistic, limits)
    rows = np.arange(len(cells) + 1) - 0.5
    axis.pcolormesh(edges, rows, cells, cmap=_COLORS, vmin=0, vmax=255, rasterized=True)
    axis.invert_yaxis()
    shown = range(0, len(names), -(-len(names) // _MOST_LABELS))
    axis.set_yticks(list(shown), [names[at] for at in shown], fontsize=6, parse_math=False)
    axis.set_xlabel("step")
    for alarm in run.alarms:
        row = row_of_tensor.get((alarm["layer"], alarm["operand"]))
        if row is not None:
            axis.plot(alarm["since"], row, "^", color="#b3261e", markeredgecolor="white", markersize=7)
    _draw_scale(axis, statistic, limits[statistic.name])


def _cells(
    record: Record, statistic: Statistic, limits: Limits
) -> tuple[Any, list[int], list[str], dict[tuple[str, str], int]]:
    """The bytes of the rows that have a value, the steps at which columns begin and the last ends, the names of the
    rows, and the row of each layer and operand."""
    codes = codes_of(record, statistic, limits[statistic.name])
    has_value = np.flatnonzero((codes != MISSING).any(0)).tolist()
    tensors = [record.tensors[at] for at in has_value]
    kinds = [(each["operand"], each["cast"]) for each in tensors]
    grid = grid_of(len(record.steps), kinds, 1, _MOST_ROWS * _MOST_COLUMNS)
    names = [f"{tensors[row[0]]['layer']} {tensors[row[0]]['operand'].replace('_', ' ')}" for row in grid.rows]
    row_of_tensor: dict[tuple[str, str], int] = {}
    for at, row in enumerate(grid.rows):
        for tensor in row:
            row_of_tensor.setdefault((tensors[tensor]["layer"], tensors[tensor]["operand"]), at)
    steps = record.steps.tolist()
    edges = [*(steps[first] for first in grid.columns[:-1]), steps[-1] + every_of(record)]
    return grid.merged(codes[:, has_value]), edges, names, row_of_tensor


def _draw_scale(axis: Any, statistic: Statistic, limits: tuple[float, float]) -> None:
    """A bar of the colors whose ends are the values of the scale."""
    bar = axis.figure.colorbar(axis.collections[0], ax=axis, boundaries=np.arange(BEST + 1, WORST + 2), fraction=0.05)
    ends = [statistic.shown(statistic.unscaled(end)) for end in limits]
    bar.set_ticks([BEST + 1, WORST], labels=reversed(ends) if statistic.is_low_worse else ends, fontsize=7)
