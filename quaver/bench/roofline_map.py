"""Draws the roofline's predictions as maps of speedup, with a line where float8 begins to pay.

One column of panels for each recipe. Above, tokens against the size of a square weight; below, inputs against outputs
at the tokens of the models, whose layers are marked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patheffects
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quaver.bench.roofline import MAP_SIZES, MAP_TOKENS, Prediction, Roofline
from quaver.devices import DeviceSpec
from quaver.filters import linear_cost

LEVELS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)
"""Of speedup: the edges of the colours."""
PIXELS = 61
"""Predictions along each axis of a panel."""
COLORS = "PuOr"
"""Purple where float8 gains, orange where it loses, told apart in every kind of colour vision."""
MARKERS = "osD^v"
_MARGIN = 1.8
"""How far the panels of layers reach beyond the layers, so that their names have room."""
_OUTLINE = [matplotlib.patheffects.withStroke(linewidth=2.2, foreground="white")]

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def draw_map(roofline: Roofline, spec: DeviceSpec, image: Path) -> None:
    """Write a PNG of what `roofline` predicts for `spec`: the same bytes for the same predictions and versions."""
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10}):
        make_figure(roofline, spec).savefig(image, dpi=110, metadata={"Software": None})


def make_figure(roofline: Roofline, spec: DeviceSpec) -> Figure:
    """The picture of `draw_map`."""
    settings = roofline.settings
    recipes = settings.recipes
    figure = Figure(figsize=(1.6 + 3.9 * len(recipes), 9.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{spec.name}: {_what(spec)}\n{_assumptions(roofline)}", fontsize=11)
    axes = figure.subplots(2, len(recipes), squeeze=False)
    for column, recipe in enumerate(recipes):
        above, below = axes[0][column], axes[1][column]
        mesh = _draw_tokens(above, recipe, spec, settings.microbatches)
        _draw_layers(below, recipe, spec, roofline)
        above.set_title(recipe, fontweight="bold")
        below.set_title(f"{recipe}, M = {settings.tokens:,}")
        for axis in (above, below):
            axis.set_box_aspect(1)
    bar = figure.colorbar(mesh, ax=list(axes.flat), ticks=LEVELS, shrink=0.6, aspect=40, pad=0.02)
    bar.ax.set_title("speedup", fontsize=9)
    bar.ax.set_yticklabels([f"{level:g}x" for level in LEVELS])
    figure.legend(handles=_legend(roofline), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _what(spec: DeviceSpec) -> str:
    if spec.float8_tflops is None:
        return "predicted speedup of a float8 linear over bfloat16, where float8 is widened and multiplied in bfloat16"
    return "predicted speedup of a float8 linear over bfloat16, forward and backward"


def _assumptions(roofline: Roofline) -> str:
    shared = roofline.settings.microbatches
    weights = (
        "weights cast in forward and backward" if shared is None else f"weights cast once in {shared} microbatches"
    )
    return f"a prediction from data sheets and published matmul rates, not measured; {weights}"


def _draw_tokens(axis: Any, recipe: str, spec: DeviceSpec, microbatches: int | None) -> Any:
    sizes, tokens = _spread(MAP_SIZES), _spread(MAP_TOKENS)
    speedups = np.array(
        [[linear_cost(m, k, k, recipe, spec, microbatches=microbatches).speedup for k in sizes] for m in tokens]
    )
    axis.set(xlabel="K = N (features; 1k = 1024)", ylabel="M (tokens)")
    return _draw_speedups(axis, sizes, tokens, speedups, label_all=True)


def _draw_layers(axis: Any, recipe: str, spec: DeviceSpec, roofline: Roofline) -> None:
    tokens, microbatches = roofline.settings.tokens, roofline.settings.microbatches
    layers = [row for row in roofline.layers if (row.device, row.recipe) == (spec.name, recipe)]
    marked = [size for row in layers for size in (row.k, row.n)]
    smallest = min((MAP_SIZES[0], *(max(1, round(size / _MARGIN)) for size in marked)))
    sizes = _spread((smallest, round(_MARGIN * max((MAP_SIZES[-1], *marked)))))
    speedups = np.array(
        [[linear_cost(tokens, k, n, recipe, spec, microbatches=microbatches).speedup for k in sizes] for n in sizes]
    )
    axis.set(xlabel="K (input features)", ylabel="N (output features)")
    _draw_speedups(axis, sizes, sizes, speedups, label_all=False)  # the layers' own figures are there
    markers = {model.name: MARKERS[i % len(MARKERS)] for i, model in enumerate(roofline.settings.models)}
    for row in layers:
        _mark(axis, row, markers[row.model])


def _spread(sizes: tuple[int, ...]) -> list[int]:
    """PIXELS whole numbers from the smallest to the largest size, evenly on a logarithmic axis."""
    return [round(size) for size in np.geomspace(min(sizes), max(sizes), PIXELS)]


def _draw_speedups(axis: Any, columns: list[int], rows: list[int], speedups: Numbers, *, label_all: bool) -> Any:
    colors = matplotlib.colormaps[COLORS]
    norm = BoundaryNorm(LEVELS, colors.N, extend="both")
    mesh = axis.contourf(columns, rows, speedups, levels=LEVELS, cmap=colors, norm=norm, extend="both")
    others = [level for level in LEVELS if level != 1]
    lines = axis.contour(columns, rows, speedups, levels=others, colors="0.25", linewidths=0.5)
    labels = list(axis.clabel(lines, fmt="%gx", fontsize=7, inline_spacing=2)) if label_all else []
    pays = axis.contour(columns, rows, speedups, levels=[1.0], colors="black", linewidths=2.2)
    for label in [*labels, *axis.clabel(pays, fmt="1x", fontsize=9, inline_spacing=2)]:
        label.set_path_effects(_OUTLINE)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(lambda value, _: _short(value))
    return mesh


def _short(value: float) -> str:
    """4096 as 4k."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _mark(axis: Any, row: Prediction, marker: str) -> None:
    axis.plot(row.k, row.n, marker, color="black", markerfacecolor="white", markersize=6, zorder=3)
    style: dict[str, Any] = {"fontsize": 7.5, "path_effects": _OUTLINE, "horizontalalignment": "center"}
    name = f"{row.layer} {row.cost.speedup:.2f}"
    axis.annotate(name, (row.k, row.n), xytext=(0, 6), textcoords="offset points", **style)


def _legend(roofline: Roofline) -> list[Line2D]:
    style: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "linestyle": "none"}
    models = [
        Line2D([], [], marker=MARKERS[i % len(MARKERS)], label=f"{model.name}: linears and their speedup", **style)
        for i, model in enumerate(roofline.settings.models)
    ]
    return [Line2D([], [], color="black", linewidth=2.2, label="float8 as fast as bfloat16"), *models]
