"""The persistent scales of a run: one JSON object per recorded step in float8_scales.jsonl, and their plot.

    {"step": 7, "run": "delayed",
     "quant_scale":     {"model.layers.0.mlp.down_proj.input": 301.2, ...},   the scale of the step's casts
     "amax":            {...},   of the step, over all ranks
     "used_over_ideal": {...},   quant_scale / the scale that maps amax to the format's largest number
     "saturated":       {...},   elements, the most in one cast on one rank; only of tensors that saturated
     "dynamic":         [...],   tensors scaled dynamically: without a history, or after leaving the window
     "nonfinite":       [...]}   tensors with an inf or a NaN, which have no amax

A tensor is named `<linear>.<operand>`; an input that linears share has the name of the first one. Tensors that were not
cast in the step have no entry. JSON has no NaN, so a tensor without a number (no scale fits an amax of 0) has no entry.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from quaver import TensorScaling
from quaver.trainer.metrics import Records

Grid = np.ndarray[Any, np.dtype[np.float64]]
"""[tensors, records], NaN where a tensor was not cast."""

MAX_LABELS = 45
"""Panels with more tensors label every second or third one, and so on."""


def scales_record(step: int, run: str, report: Iterable[TensorScaling]) -> dict[str, Any]:
    """Return the record of a step from its `Float8ScalingState.report`."""
    cast = [tensor for tensor in report if _was_cast(tensor)]
    columns = {
        name: {tensor.name: _short(value) for tensor in cast if math.isfinite(value := getattr(tensor, name))}
        for name in ("quant_scale", "amax", "used_over_ideal")
    }
    return {
        "step": step,
        "run": run,
        **columns,
        "saturated": {tensor.name: tensor.saturated for tensor in cast if tensor.saturated},
        "dynamic": [tensor.name for tensor in cast if tensor.is_dynamic],
        "nonfinite": [tensor.name for tensor in cast if not math.isfinite(tensor.amax)],
    }


def saturation_summary(report: Sequence[TensorScaling]) -> dict[str, int]:
    """Return the fields of metrics.jsonl on a step's persistent scales; empty if there are none."""
    if not report:
        return {}
    counts = [tensor.saturated for tensor in report if _was_cast(tensor)]
    return {"float8_saturated": sum(counts), "float8_saturated_tensors": sum(count > 0 for count in counts)}


def _was_cast(tensor: TensorScaling) -> bool:
    return not tensor.amax < 0  # a tensor with a NaN was cast


def _short(value: float) -> float:
    """Round to nine digits, which identify every float32."""
    return float(f"{value:.9g}")


@dataclass(frozen=True)
class Panel:
    """The tensors of one operand, in the order of the model."""

    names: list[str]
    exponent: Grid
    """log2 of quant_scale."""
    saturated: Grid
    """The number of elements that saturated."""
    dynamic: Grid
    """1 where the scale was dynamic, else 0."""


def draw_scales(scales: Path, image: Path, *, title: str) -> None:
    """Write a PNG with heat maps of tensors x steps, one column for each operand.

    Above, the exponent of the scale, with dots where it was dynamic; below, how many elements saturated.
    """
    records = Records(scales)
    panels = panels_of(records)
    height = min(max(0.13 * max((len(panel.names) for panel in panels.values()), default=0) + 0.5, 2.2), 9)
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(1.6 + 4.6 * max(1, len(panels)), 2 * height + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{title}: persistent scales; dots: scaled dynamically", fontsize=10)
        if not panels:
            figure.text(0.5, 0.5, "no step was recorded", ha="center")
        for column, (operand, panel) in enumerate(panels.items()):
            _draw_panel(figure, panel, operand, [record["step"] for record in records], column, len(panels))
        figure.savefig(image, dpi=150)


def panels_of(records: Iterable[dict[str, Any]]) -> dict[str, Panel]:
    """Return the panel of each operand in `records`, which are read several times and not held."""
    by_operand: dict[str, list[str]] = {}
    for name in _names(records):
        by_operand.setdefault(name.rpartition(".")[2], []).append(name)
    return {operand: _panel(names, records) for operand, names in by_operand.items()}


def _names(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return every tensor in the order of the model, which each record has, although none has all tensors."""
    order: list[str] = []
    known: set[str] = set()
    for record in records:
        names = list(dict.fromkeys([*record["amax"], *record["nonfinite"]]))
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                order.insert(order.index(before) + 1 if before else 0, name)
                known.add(name)
    return order


def _panel(names: list[str], records: Iterable[dict[str, Any]]) -> Panel:
    count = sum(1 for _ in records)
    exponent, saturated, dynamic = (np.full((len(names), count), np.nan) for _ in range(3))
    for column, record in enumerate(records):
        nonfinite, scaled_dynamically = set(record["nonfinite"]), set(record["dynamic"])
        for row, name in enumerate(names):
            if name in record["amax"] or name in nonfinite:
                exponent[row, column] = np.log2(record["quant_scale"].get(name, np.nan))
                saturated[row, column] = record["saturated"].get(name, 0)
                dynamic[row, column] = name in scaled_dynamically
    return Panel(names, exponent, saturated, dynamic)


def _draw_panel(figure: Figure, panel: Panel, operand: str, steps: list[int], column: int, columns: int) -> None:
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 else 0.5
    edges, rows = np.array([*steps, steps[-1] + 2 * half]) - half, np.arange(len(panel.names) + 1)
    above, below = (figure.add_subplot(2, columns, 1 + column + row * columns) for row in (0, 1))
    exponents = above.pcolormesh(edges, rows, panel.exponent, cmap="viridis")
    figure.colorbar(exponents, ax=above, label="log2 of quant_scale")
    dynamic_rows, dynamic_columns = np.nonzero(panel.dynamic == 1)
    above.scatter(np.array(steps)[dynamic_columns], dynamic_rows + 0.5, s=6, color="#d1495b", linewidths=0)
    # Casts without saturation are gray, tensors that were not cast are white.
    below.pcolormesh(edges, rows, np.where(np.isnan(panel.saturated), np.nan, 0.15), cmap="Greys", vmin=0, vmax=1)
    norm = LogNorm(1, max(10.0, float(np.nan_to_num(panel.saturated).max())))
    counts = np.where(panel.saturated > 0, panel.saturated, np.nan)
    mesh = below.pcolormesh(edges, rows, counts, cmap="plasma_r", norm=norm)
    figure.colorbar(mesh, ax=below, label="saturated elements (gray: none)")
    every = -(-len(panel.names) // MAX_LABELS)
    for axis, what in ((above, "scale"), (below, "saturation")):
        axis.set(title=f"{operand}: {what}", xlabel="step")
        axis.set_yticks(rows[:-1:every] + 0.5, short_names(panel.names)[::every], fontsize=6)
        axis.invert_yaxis()


def short_names(names: Sequence[str]) -> list[str]:
    """Return the numbers and the last name of each tensor's linear, or its full name if these are ambiguous."""
    linears = [name.rpartition(".")[0] for name in names]
    short = [" ".join([*re.findall(r"\d+", linear), linear.rpartition(".")[2]]) for linear in linears]
    return short if len(set(short)) == len(short) else linears
