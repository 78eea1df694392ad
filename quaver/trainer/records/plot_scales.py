"""Draws the kept scales of a run from its float8_scales.jsonl: heat maps of tensors x steps.

One column of panels for each operand. Above, the exponent of the scale, with a dot where a step took the scale from the
tensor itself; below, how many elements saturated.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from quaver.trainer.records.metrics import read_metrics

Record = dict[str, Any]
Grid = np.ndarray[Any, np.dtype[np.float64]]
"""[tensors, columns], NaN where a tensor was not cast."""

MOST_COLUMNS = 300
"""Of more recorded steps neighbours share a column, so that no saturation falls between two pixels."""
MOST_LABELS = 45
"""Of more tensors every second or third, and so on, has its name beside it."""
DYNAMIC, NONE_SATURATED, NOT_CAST = "#d1495b", "#e3e6ea", "white"


@dataclass(frozen=True)
class Panel:
    """One operand's tensors, in the order of the model, and what each column of steps saw of them."""

    operand: str
    names: list[str]
    exponent: Grid
    """log2 of the smallest scale."""
    saturated: Grid
    """The most elements that saturated."""
    dynamic: Grid
    """1 where a step took the scale from the tensor itself, else 0."""


def draw_scales(scales: Path, image: Path, *, title: str) -> None:
    """Write a PNG of the records in `scales`: of an interrupted run, as far as it came."""
    records = read_metrics(scales)
    per_column = max(1, -(-len(records) // MOST_COLUMNS))
    panels = panels_of(records, per_column)
    rows = max((len(panel.names) for panel in panels), default=0)
    height = min(max(0.13 * rows + 0.5, 2.2), 9)
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(1.6 + 4.6 * max(1, len(panels)), 2 * height + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        shared = f", up to {per_column} recorded steps in a column" if per_column > 1 else ""
        figure.suptitle(f"{title}: scales kept from step to step{shared}", fontsize=10)
        if panels:
            _draw(figure, panels, _column_edges([record["step"] for record in records], per_column))
        else:
            figure.text(0.5, 0.5, "no step was recorded", ha="center")
        figure.savefig(image, dpi=150)


def panels_of(records: Sequence[Record], per_column: int = 1) -> list[Panel]:
    """Return a panel for each operand that `records` tell of; `per_column` of them make a column."""
    by_operand: dict[str, list[str]] = {}
    for name in _names(records):
        by_operand.setdefault(name.rpartition(".")[2], []).append(name)
    starts = np.arange(0, len(records), per_column)
    return [_panel(operand, names, records, starts) for operand, names in by_operand.items()]


def short_names(names: Sequence[str]) -> list[str]:
    """Return what tells these tensors of one operand apart: numbers and the linear's own name, if that is enough."""
    linears = [name.rpartition(".")[0] for name in names]
    short = [" ".join([*re.findall(r"\d+", name.rpartition(".")[0]), name.rpartition(".")[2]]) for name in linears]
    return short if len(set(short)) == len(short) else linears


def _names(records: Sequence[Record]) -> list[str]:
    """Every tensor in the order of the model, which each record keeps; not all are in each."""
    order: list[str] = []
    known: set[str] = set()
    for record in records:
        names = list(dict.fromkeys([*record["amax"], *record["nonfinite"]]))
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                order.insert(order.index(before) + 1 if before else 0, name)
                known.add(name)
    return order


def _panel(operand: str, names: list[str], records: Sequence[Record], starts: "np.ndarray[Any, Any]") -> Panel:
    exponent, saturated, dynamic = (np.full((len(names), len(records)), np.nan) for _ in range(3))
    for column, record in enumerate(records):
        nonfinite, by_itself = set(record["nonfinite"]), set(record["dynamic"])
        for row, name in enumerate(names):
            if name in record["amax"] or name in nonfinite:
                exponent[row, column] = np.log2(record["quant_scale"].get(name, np.nan))
                saturated[row, column] = record["saturated"].get(name, 0)
                dynamic[row, column] = name in by_itself
    return Panel(
        operand,
        names,
        np.fmin.reduceat(exponent, starts, axis=1),
        np.fmax.reduceat(saturated, starts, axis=1),
        np.fmax.reduceat(dynamic, starts, axis=1),
    )


def _column_edges(steps: Sequence[int], per_column: int) -> "np.ndarray[Any, Any]":
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 else 0.5
    return np.array([*steps[::per_column], steps[-1] + 2 * half]) - half


def _draw(figure: Figure, panels: Sequence[Panel], edges: "np.ndarray[Any, Any]") -> None:
    axes = figure.subplots(2, len(panels), squeeze=False, sharex=True)
    most = max(float(np.nanmax(panel.saturated)) for panel in panels)
    for panel, above, below in zip(panels, axes[0], axes[1], strict=True):
        _draw_exponent(figure, above, panel, edges)
        mesh = _draw_saturated(below, panel, edges, most)
        for axis, what in ((above, "scale"), (below, "saturation")):
            axis.set_title(f"{panel.operand}: {what}")
            axis.set_facecolor(NOT_CAST)
            _label_rows(axis, panel.names)
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.colorbar(mesh, ax=list(axes[1]), label="saturated elements", **_bar(figure))
    dot = Line2D([], [], color=DYNAMIC, marker="o", markersize=3, linestyle="none", label="scaled dynamically")
    none = Patch(facecolor=NONE_SATURATED, edgecolor="gray", label="none saturated")
    blank = Patch(facecolor=NOT_CAST, edgecolor="gray", label="not cast")
    figure.legend(handles=[dot, none, blank], loc="outside lower center", ncols=3, frameon=False)


def _draw_exponent(figure: Figure, axis: Any, panel: Panel, edges: "np.ndarray[Any, Any]") -> None:
    mesh = axis.pcolormesh(edges, np.arange(len(panel.names) + 1), panel.exponent, cmap="viridis")
    figure.colorbar(mesh, ax=axis, label="log2 of quant_scale", **_bar(figure))
    rows, columns = np.nonzero(panel.dynamic == 1)
    centres = (edges[:-1] + edges[1:]) / 2
    axis.scatter(centres[columns], rows + 0.5, s=6, color=DYNAMIC, linewidths=0)


def _draw_saturated(axis: Any, panel: Panel, edges: "np.ndarray[Any, Any]", most: float) -> Any:
    """Draw counts in logarithmic colours, and a count of 0 in a colour that is none of these."""
    rows = np.arange(len(panel.names) + 1)
    none = np.where(panel.saturated == 0, 0.0, np.nan)
    axis.pcolormesh(edges, rows, none, cmap=ListedColormap([NONE_SATURATED]))
    counts = np.where(panel.saturated > 0, panel.saturated, np.nan)
    return axis.pcolormesh(edges, rows, counts, cmap=_counts_map(), norm=LogNorm(1, max(most, 10)))


def _bar(figure: Figure) -> dict[str, Any]:
    """A colour bar as wide beside a high panel as beside a low one."""
    return {"aspect": 5 * figure.get_figheight(), "pad": 0.02}


def _counts_map() -> Any:
    """Without the palest colours, which a single element would have: they are too near to none."""
    return ListedColormap(matplotlib.colormaps["inferno_r"](np.linspace(0.15, 1, 256)))


def _label_rows(axis: Any, names: Sequence[str]) -> None:
    every = -(-len(names) // MOST_LABELS)
    axis.set_yticks(np.arange(len(names))[::every] + 0.5, short_names(names)[::every], fontsize=6)
    axis.invert_yaxis()
