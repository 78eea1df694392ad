"""Draws the report of a recording with matplotlib: live bytes by category over a step, and the largest at the peak."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from quaver.recorder.byte_sizes import unit_of
from quaver.recorder.rows import merged_layers

Array = np.ndarray[Any, np.dtype[np.float64]]

COLORS = {
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
"""P. Tol's muted scheme for colour-blind readers; neighbours in the stack also differ in lightness. The tenth colour is
from his older scheme."""

MOST_POINTS = 3000
"""Columns of a timeline at most; of neighbouring events that share one, the highest is drawn."""
SPANS = {"forward": "#f2f2f2", "backward": "#d9d9d9", "recompute": "#c4c4c4", "optimizer": "#e6e0d4"}
_NARROWEST_LABEL = 0.05
MOST_BARS = 20
_INCHES_PER_BAR = 0.36
_WORDS_WIDTH = 80


def draw_timeline(report: dict[str, Any], image: Path, *, title: str) -> None:
    """Write a PNG of the timeline of `report` (`Timeline.report`), or of the reason why it has none."""
    with _picture(image, title, height_inches=5) as figure:
        if report["timeline"]:
            _draw(figure, report)
        else:
            figure.text(0.5, 0.5, f"no timeline: {report['note']}", ha="center")


def draw_peak(report: dict[str, Any], image: Path, *, title: str) -> None:
    """Write a PNG of the rows alive at the peak of `report` as bars, or of the reason why it has none.

    Rows of equal layers are merged; those after the first MOST_BARS are one bar.
    """
    rows = merged_layers(report["at_peak"])
    bars = min(len(rows), MOST_BARS + 1)
    with _picture(image, title, height_inches=max(2.0, 1.2 + _INCHES_PER_BAR * bars)) as figure:
        if rows:
            _draw_bars(figure, rows)
        else:
            figure.text(0.5, 0.5, f"no peak: {report['note']}", ha="center")


@contextmanager
def _picture(image: Path, title: str, height_inches: float) -> Iterator[Figure]:
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=10, parse_math=False)
        yield figure
        figure.savefig(image, dpi=150)


def _draw_bars(figure: Figure, rows: list[dict[str, Any]]) -> None:
    total_bytes = sum(row["bytes"] for row in rows)
    bars = [(_words(row), row["bytes"], COLORS[row["category"]]) for row in rows[:MOST_BARS]]
    if rest := rows[MOST_BARS:]:
        bars.append((f"{len(rest):,} smaller rows", sum(row["bytes"] for row in rest), "#bbbbbb"))
    unit_bytes, unit = unit_of(bars[0][1])
    axis = figure.subplots()
    values = [size_bytes / unit_bytes for _, size_bytes, _ in bars]
    drawn = axis.barh(range(len(bars)), values, color=[color for *_, color in bars])
    axis.bar_label(drawn, [f"{_size(size)} ({size / total_bytes:.1%})" for _, size, _ in bars], padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), [words for words, *_ in bars], fontsize=8, parse_math=False)
    axis.set_xlabel(f"{unit}, of {_size(total_bytes)} at the peak")
    axis.set_xlim(0, 1.25 * max(values))
    axis.set_ylim(len(bars) - 0.5, -0.5)
    _name_colors(figure, list(dict.fromkeys(row["category"] for row in rows[:MOST_BARS])))


def _name_colors(figure: Figure, categories: list[str]) -> None:
    patches = [Patch(color=COLORS[name], label=name.replace("_", " ")) for name in categories]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)


def _words(row: dict[str, Any]) -> str:
    """Module and operator; below, the number and kind of tensors. Unknown parts are left out."""
    operator = row["operator"] or ""
    made_by = operator.partition(" (")[2].removesuffix(")") or operator
    tensors = f"{row['count']} x {row['dtype']} {row['shape']}" if row["dtype"] else ""
    lines = [f"{row['module'] or '(no module)'}  {made_by}", tensors]
    return "\n".join(textwrap.shorten(line, _WORDS_WIDTH, placeholder=" ...") for line in lines if line)


def _size(size_bytes: int) -> str:
    unit_bytes, unit = unit_of(size_bytes)
    return f"{size_bytes / unit_bytes:.4g} {unit}"


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    rows = column_maxima(report["timeline"], MOST_POINTS, keep=[report["peak_event"]])
    events, series = rows[:, 0], rows[:, 2:].T
    peak_bytes = report["peak_bytes"]
    unit_bytes, unit = unit_of(peak_bytes)
    axis = figure.subplots()
    named = zip(report["columns"][2:], series, strict=True)
    shown = [(name, values / unit_bytes) for name, values in named if values.any()]
    axis.stackplot(
        events,
        [values for _, values in shown],
        step="post",
        labels=[name.replace("_", " ") for name, _ in shown],
        colors=[COLORS[name] for name, _ in shown],
        linewidth=0,
        zorder=2,
    )
    axis.set(xlabel="event (allocation, release, or start and end of being kept)", ylabel=f"live tensors ({unit})")
    axis.set_xlim(0, max(events[-1], 1))
    axis.set_ylim(0, 1.22 * peak_bytes / unit_bytes)
    _mark_spans(axis, report["spans"], events[-1])
    _mark_peak(axis, report["peak_event"], peak_bytes / unit_bytes, unit, events[-1])
    _show_time(axis, report["timeline"])
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, title="live tensors")


def _mark_spans(axis: Any, spans: list[list[Any]], last_event: float) -> None:
    place = axis.get_xaxis_transform()
    for phase, begin, end in _joined(spans):
        if phase not in SPANS:
            continue
        axis.axvspan(begin, end, color=SPANS[phase], linewidth=0, zorder=1)
        is_wide = end - begin > _NARROWEST_LABEL * last_event
        if not is_wide:
            axis.axvline(begin, color="#444444", linestyle=":", linewidth=0.8, zorder=3)
        rotation, where = (0, (begin + end) / 2) if is_wide else (90, begin - 0.01 * last_event)
        axis.text(where, 0.975, phase, ha="center", va="top", rotation=rotation, transform=place, color="#444444")


def _joined(spans: list[list[Any]]) -> list[list[Any]]:
    """The spans with recomputations merged into backward, and neighbours of one phase merged."""
    joined: list[list[Any]] = []
    for phase, begin, end in spans:
        phase = "backward" if phase == "recompute" else phase
        if joined and joined[-1][0] == phase:
            joined[-1][2] = end
        else:
            joined.append([phase, begin, end])
    return joined


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


def _show_time(axis: Any, timeline: list[list[Any]]) -> None:
    """Add a second axis above: the times of the ticks below."""
    above = axis.secondary_xaxis("top")
    ticks = [tick for tick in axis.get_xticks() if 0 <= tick < len(timeline)]
    above.set_xticks(ticks, [_ms(timeline[int(tick)][1] / 1e3) for tick in ticks])
    above.set_xlabel("ms since the start of the step, while recorded")


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def column_maxima(timeline: Iterable[Iterable[float]], most: int, *, keep: Iterable[int] = ()) -> Array:
    """About `most` rows of `timeline`, the highest of each run of neighbours, and so the highest of all.

    Args:
        timeline: rows of [event, microseconds, bytes of each category].
        keep: indices of rows to include, besides the first and the last.
    Returns:
        float64 [rows, columns of `timeline`]; bytes are exact up to 2^53.
    """
    rows = np.array(timeline, dtype=np.float64)
    if len(rows) <= most:
        return rows
    totals = rows[:, 2:].sum(1)
    edges = np.linspace(0, len(rows), most + 1).astype(int)
    highest = [int(first + totals[first:last].argmax()) for first, last in zip(edges, edges[1:], strict=False)]
    return rows[np.unique([0, *highest, *keep, len(rows) - 1])]
