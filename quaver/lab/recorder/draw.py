"""Draws the report of a recording with matplotlib: live bytes by category over a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quaver.lab.figure import open_figure
from quaver.lab.terminal.byte_sizes import choose_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[np.float64]]

CATEGORY_COLORS = {
    "parameters": "#332288",
    "gradients": "#88ccee",
    "optimizer_state": "#882255",
    "persistent_scales": "#aa4499",
    "inputs": "#999933",
    "gathered_weights": "#44aa99",
    "float8_weights": "#117733",
    "saved_activations": "#ddcc77",
    "communication": "#661100",
    "temporaries": "#cc6677",
}
"""P. Tol's muted scheme for color-blind readers. Adjacent layers of the stack also differ in lightness. The tenth color
is from his older scheme."""

MAX_COLUMNS = 1500
"""The most columns of a timeline. If several adjacent events share a column, the highest is drawn."""
PHASE_COLORS = {"forward": "#f2f2f2", "backward": "#d9d9d9", "recompute": "#c4c4c4", "optimizer": "#e6e0d4"}
_NARROWEST_LABEL = 0.05
"""The share of the width below which a phase is labeled vertically."""


def draw_timeline(report: dict[str, Any], image: Path, *, title: str) -> None:
    """Write a PNG of the timeline of `report` (`Timeline.report`), or of the note that says why it has none."""
    with open_figure(image, (10, 5), title=title) as figure:
        if report["peak_bytes"]:
            _draw(figure, report)
        else:
            figure.text(0.5, 0.5, f"no timeline: {report['note'] or 'no tensor was alive'}", ha="center")


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    rows = reduce_rows(report["timeline"], MAX_COLUMNS, keep=[report["peak_event"]])
    events, series = rows[:, 0], rows[:, 2:].T
    peak_bytes = report["peak_bytes"]
    unit_bytes, unit = choose_unit(peak_bytes)
    axis = figure.subplots()
    named = zip(report["columns"][2:], series, strict=True)
    shown = [(name, values / unit_bytes) for name, values in named if values.any()]
    axis.stackplot(
        events,
        [values for _, values in shown],
        step="post",
        labels=[name.replace("_", " ") for name, _ in shown],
        colors=[CATEGORY_COLORS[name] for name, _ in shown],
        linewidth=0,
        zorder=2,
    )
    axis.set(xlabel="event (allocation, release, or start and end of being saved)", ylabel=f"live tensors ({unit})")
    axis.set_xlim(0, max(events[-1], 1))
    axis.set_ylim(0, 1.22 * peak_bytes / unit_bytes)
    _mark_spans(axis, report["spans"], events[-1])
    _mark_peak(axis, report["peak_event"], peak_bytes / unit_bytes, unit, events[-1])
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, title="live tensors")


def _mark_spans(axis: Any, spans: list[list[Any]], last_event: float) -> None:
    transform = axis.get_xaxis_transform()
    for phase, start, end in _merge_spans(spans):
        if phase not in PHASE_COLORS:
            continue
        axis.axvspan(start, end, color=PHASE_COLORS[phase], linewidth=0, zorder=1)
        is_wide = end - start > _NARROWEST_LABEL * last_event
        if not is_wide:
            axis.axvline(start, color="#444444", linestyle=":", linewidth=0.8, zorder=3)
        rotation, x = (0, (start + end) / 2) if is_wide else (90, start - 0.01 * last_event)
        axis.text(x, 0.975, phase, ha="center", va="top", rotation=rotation, transform=transform, color="#444444")


def _merge_spans(spans: list[list[Any]]) -> list[list[Any]]:
    renamed = [("backward" if phase == "recompute" else phase, start, end) for phase, start, end in spans]
    groups = [(phase, list(group)) for phase, group in groupby(renamed, key=itemgetter(0))]
    return [[phase, group[0][1], group[-1][2]] for phase, group in groups]


def _mark_peak(axis: Any, event: int, height: float, unit: str, last_event: float) -> None:
    is_left = event < last_event / 2
    axis.plot([event], [height], "v", color="black", markersize=6, zorder=4)
    axis.annotate(
        f"peak {height:.4g} {unit}, event {event}",
        (event, height),
        xytext=(8 if is_left else -8, 8),
        textcoords="offset points",
        ha="left" if is_left else "right",
        zorder=4,
    )


def reduce_rows(timeline: Iterable[Iterable[float]], max_rows: int, *, keep: Iterable[int] = ()) -> Array:
    """Reduce `timeline` to about `max_rows` rows: the highest row of each group of adjacent rows.

    Args:
        timeline: rows of [event, microseconds, bytes of each category].
        keep: indices of rows to include, in addition to the first and the last.
    Returns:
        float64 [rows, columns of `timeline`]. Bytes are exact up to 2^53.
    """
    rows = np.array(timeline, dtype=np.float64)
    if len(rows) <= max_rows:
        return rows
    totals = rows[:, 2:].sum(1)
    edges = np.linspace(0, len(rows), max_rows + 1).astype(int)
    highest = [int(first + totals[first:last].argmax()) for first, last in zip(edges, edges[1:], strict=False)]
    return rows[np.unique([0, *highest, *keep, len(rows) - 1])]
