"""Draws a step: the compute stream and each link over time, for the whole step and for a short part of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quaver.lab.figure import open_figure
from quaver.lab.plan.simulate import ExtrapolatedTimeline, SimulatedTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND_COLORS = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "optimizer": "#b279a2",
    "copies": "#9d9d9d",
    "all_gather": "#f58518",
    "reduce_scatter": "#e45756",
    "all_reduce": "#eeca3b",
    "all_to_all": "#72b7b2",
    "checkpoint": "#ff9da6",
}
_ZOOMED_SHARE = 0.08
"""The share of the step, around the end of the forward, that the second row of the picture shows."""


def draw_step(timeline: SimulatedTimeline, path: Path, *, title: str) -> None:
    """Write a PNG: each stream's simulated tasks over milliseconds, colored by kind; below, a short part of them.

    An extrapolated timeline has only the tasks of its first microbatches, which the picture says.
    """
    backward_start_s = next((span.start_s for span in timeline.spans if span.task.kind == "backward"), 0.0)
    end_s = max(span.end_s for span in timeline.spans)
    half_s = end_s * _ZOOMED_SHARE / 2
    with open_figure(path, (12, 5.2), title=title) as figure:
        step_axes, zoomed_axes = figure.subplots(2, 1)
        _draw_streams(step_axes, timeline, 0.0, end_s)
        _draw_streams(zoomed_axes, timeline, max(0.0, backward_start_s - half_s), backward_start_s + half_s)
        if isinstance(timeline, ExtrapolatedTimeline):
            step_axes.set_title(f"without {timeline.further_micro_batches} further microbatches", fontsize=9)
        zoomed_axes.set_title("where the backward begins", fontsize=9)
        handles, labels = step_axes.get_legend_handles_labels()
        handle_by_kind = dict(zip(labels, handles, strict=True))
        names = {kind: kind.replace("_", "-") for kind in KIND_COLORS if kind in handle_by_kind}
        handles = [handle_by_kind[kind] for kind in names]
        figure.legend(handles, names.values(), loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)


def _draw_streams(axes: Axes, timeline: SimulatedTimeline, first_s: float, last_s: float) -> None:
    for row, stream in enumerate(timeline.streams):
        for kind, color in KIND_COLORS.items():
            bars = [
                (1e3 * span.start_s, 1e3 * (span.end_s - span.start_s))
                for span in timeline.spans
                if span.task.stream == stream
                and span.task.kind == kind
                and span.end_s > first_s < last_s > span.start_s
            ]
            if bars:
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.2, label=kind
                )
    axes.set_yticks(range(len(timeline.streams)), timeline.streams)
    axes.set_ylim(len(timeline.streams) - 0.5, -0.5)
    axes.set_xlim(1e3 * first_s, 1e3 * last_s)
    axes.set_xlabel("ms")
