"""Draws the roofline as maps of speedup over tokens and layer size, with a line where float8 begins to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.patheffects
import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quaver.lab.bench.roofline import Roofline
from quaver.lab.figure import open_figure
from quaver.roofline.cost import predict_linear_cost
from quaver.roofline.device_specs import DeviceSpec

_TOKENS_RANGE, _FEATURES_RANGE = (2**9, 2**17), (2**9, 2**15)
"""The ends of the axes: M, and K = N."""
_POINTS_PER_AXIS = 61
"""Predictions along each axis."""
_SPEEDUP_LEVELS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)
"""Speedups at the edges of the colors."""
_COLORMAP = matplotlib.colormaps["PuOr"]
"""Purple where float8 gains, orange where it loses: distinct with every kind of color vision."""
_OUTLINE = [matplotlib.patheffects.withStroke(linewidth=2.2, foreground="white")]


def draw_map(roofline: Roofline, spec: DeviceSpec, image: Path) -> None:
    """Write a PNG of the predictions for `spec`: the same bytes for the same predictions and versions."""
    with open_figure(image, (1.8 + 3.6 * len(roofline.settings.recipes), 4.9)) as figure:
        draw_panels(figure, roofline, spec)


def draw_panels(figure: Figure, roofline: Roofline, spec: DeviceSpec) -> None:
    """Draw one panel for each recipe."""
    recipes, microbatches = roofline.settings.recipes, roofline.settings.microbatches
    weights = "in forward and backward" if microbatches is None else f"once in {microbatches} microbatches"
    widened = "" if spec.float8_tflops is not None else "; float8 is widened and multiplied in bfloat16"
    figure.suptitle(
        f"{spec.name}: predicted speedup of a float8 linear over bfloat16, forward and backward{widened}\n"
        f"from data sheets and published matmul rates, not measured; weights cast {weights}",
        fontsize=11,
    )
    axes = figure.subplots(1, len(recipes), squeeze=False)[0]
    for axis, recipe in zip(axes, recipes, strict=True):
        mesh = _draw_speedups(axis, recipe, spec, microbatches)
        axis.set_title(recipe, fontweight="bold", fontsize=10)
    colorbar = figure.colorbar(mesh, ax=list(axes), ticks=_SPEEDUP_LEVELS, shrink=0.8, aspect=30, pad=0.02)
    colorbar.ax.set_title("speedup", fontsize=9)
    colorbar.ax.set_yticklabels([f"{level:g}x" for level in _SPEEDUP_LEVELS])
    break_even = Line2D([], [], color="black", linewidth=2.2, label="float8 as fast as bfloat16")
    figure.legend(handles=[break_even], loc="outside lower center", frameon=False)


def _draw_speedups(axis: Any, recipe: str, spec: DeviceSpec, microbatches: int | None) -> Any:
    sizes, tokens = (
        [round(edge) for edge in np.geomspace(*ends, _POINTS_PER_AXIS)] for ends in (_FEATURES_RANGE, _TOKENS_RANGE)
    )
    speedups = np.array(
        [[predict_linear_cost(m, k, k, recipe, spec, microbatches=microbatches).speedup for k in sizes] for m in tokens]
    )
    norm = BoundaryNorm(_SPEEDUP_LEVELS, _COLORMAP.N, extend="both")
    mesh = axis.contourf(sizes, tokens, speedups, levels=_SPEEDUP_LEVELS, cmap=_COLORMAP, norm=norm, extend="both")
    levels = [level for level in _SPEEDUP_LEVELS if level != 1]
    lines = axis.contour(sizes, tokens, speedups, levels=levels, colors="0.25", linewidths=0.5)
    break_even = axis.contour(sizes, tokens, speedups, levels=[1.0], colors="black", linewidths=2.2)
    labels = [*axis.clabel(lines, fmt="%gx", fontsize=7, inline_spacing=2)]
    for label in [*labels, *axis.clabel(break_even, fmt="1x", fontsize=9, inline_spacing=2)]:
        label.set_path_effects(_OUTLINE)
    axis.set(xlabel="K = N (features; 1k = 1024)", ylabel="M (tokens)", box_aspect=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    return mesh
