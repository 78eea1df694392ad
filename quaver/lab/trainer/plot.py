"""Draws curves.png from metrics.jsonl."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quaver.lab.figure import open_figure
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.trainer.step_statistics import WARMUP_STEPS

Record = dict[str, Any]

MODEL_COLORS = ("#d1495b", "#30638e")
"""The float8 model, then its bfloat16 baseline."""


def draw_curves(metrics: Path, image: Path, *, title: str) -> None:
    """Write a PNG with the losses of every model, the gap between two models, and tokens/s."""
    records = read_json_lines(metrics)
    names = list(dict.fromkeys(record["model"] for record in records if "model" in record))
    panels = 3 if len(names) == 2 else 2
    with open_figure(image, (4.6 * panels, 3.8), title=title) as figure:
        axes = list(figure.subplots(1, panels))
        _draw_losses(axes.pop(0), records, names)
        if len(names) == 2:
            _draw_gap(axes.pop(0), records, names)
        _draw_speed(axes.pop(0), records, names)


def _draw_losses(axis: Any, records: list[Record], names: list[str]) -> None:
    for name, color, marker, width in zip(names, MODEL_COLORS, "ox", (2.4, 1.0), strict=False):  # curves overlap
        steps, losses = _list_points(records, name, "loss")
        axis.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(steps, smooth(losses), color=color, linewidth=width, label=f"{name}, train")
        steps, losses = _list_points(records, name, "validation_loss")
        axis.plot(steps, losses, marker, color=color, markersize=6, fillstyle="none", label=f"{name}, validation")
    axis.set(title="Loss (nats per token)", xlabel="step")
    _finish_axis(axis)


def _draw_gap(axis: Any, records: list[Record], names: list[str]) -> None:
    for key, style, label in (("loss", "-", "train, smoothed"), ("validation_loss", "o", "validation")):
        losses, references = (dict(zip(*_list_points(records, name, key), strict=True)) for name in names)
        steps = [step for step in losses if step in references]  # a model may have skipped steps
        pair = [[curve[step] for step in steps] for curve in (losses, references)]
        if key == "loss":
            pair = [smooth(curve) for curve in pair]
        gaps = [100 * (loss / reference - 1) for loss, reference in zip(*pair, strict=True)]
        axis.plot(steps, gaps, style, color=MODEL_COLORS[0], linewidth=1.2, label=label)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.axhspan(-0.5, 0.5, color="gray", alpha=0.15, linewidth=0, label="within 0.5 %")
    axis.set(title=f"Loss gap of {names[0]} to {names[1]} (%)", xlabel="step")
    _finish_axis(axis)


def _draw_speed(axis: Any, records: list[Record], names: list[str]) -> None:
    for name, color in zip(names, MODEL_COLORS, strict=False):
        steps, speeds = _list_points(records, name, "tokens_per_s")
        axis.plot(steps[WARMUP_STEPS:], speeds[WARMUP_STEPS:], color=color, linewidth=1, label=name)
    axis.set(title="Tokens per second", xlabel="step")
    axis.set_ylim(bottom=0)
    _finish_axis(axis)


def _finish_axis(axis: Any) -> None:
    axis.grid(alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)


def _list_points(records: Iterable[Record], name: str, key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if record.get("model") == name and key in record]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float]) -> list[float]:
    """Return centered moving averages."""
    radius = min(5, len(values) // 20)
    windows = (values[max(0, i - radius) : i + radius + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
