"""Draws a step: the compute stream and each link over time, for the whole step and for a short part of it."""

from __future__ import annotations

from pathlib import Path

from quaver.lab.plan.simulate import SimulatedTimeline

COLORS = {
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
_ZOOM = 0.08
"""The share of the step, around the end of the forward, that the second row of the picture shows."""


def draw_step(timeline: SimulatedTimeline, path: Path, *, title: str) -> None:
    """Write a PNG: each stream's tasks over milliseconds, colored by kind; below, a short part of the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    whole, part = figure.subplots(2, 1)
    turn = next((s.start_s for s in timeline.spans if s.task.kind == "backward"), 0.0)
    width = timeline.seconds * _ZOOM
    for axes, first, last in ((whole, 0.0, timeline.seconds), (part, max(0.0, turn - width / 2), turn + width / 2)):
        streams = timeline.streams
        for row, stream in enumerate(streams):
            for kind, color in COLORS.items():
                spans = [
                    (1e3 * span.start_s, 1e3 * (span.end_s - span.start_s))
                    for span in timeline.spans
                    if span.task.stream == stream
                    and span.task.kind == kind
                    and span.end_s > first < last > span.start_s
                ]
                if spans:
                    axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.2)
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
        axes.set_xlim(1e3 * first, 1e3 * last)
        axes.set_xlabel("ms")
    whole.set_title(title, fontsize=10)
    part.set_title("where the backward begins", fontsize=9)
    kinds = [kind for kind in COLORS if any(span.task.kind == kind for span in timeline.spans)]
    from matplotlib.patches import Patch

    handles = [Patch(color=COLORS[kind], label=kind.replace("_", "-")) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
