"""Writes the report of runs as one HTML file that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from quaver.lab.html import PageFiles, write_page
from quaver.lab.report.facts import describe_health, is_healthy, list_facts, select_memory_curves
from quaver.lab.report.maps import Limits, find_limits, make_maps
from quaver.lab.report.palette import SPECIAL_COLORS, make_palette
from quaver.lab.report.run import RunData
from quaver.lab.report.series import collect_curves, thin_curve
from quaver.lab.report.statistics import STATISTICS, Statistic
from quaver.lab.runs.json_lines import RecordKind

_PAGE_FILES = PageFiles(
    files("quaver.lab.report") / "page",
    scripts=("chart.js", "cells.js", "heatmap.js", "heatmaps.js", "distribution.js", "tables.js", "main.js"),
    kind="Report of a training run",
    footer="Made by quaver report. A cell of a heat map is one of 252 steps of its scale; tables have exact numbers.",
)

CURVE_NAMES = ("loss", "grad_norm", "tokens_per_s", "validation_loss")
"""The numbers of metrics.jsonl that the page draws."""


def write_report(path: Path, runs: Sequence[RunData]) -> None:
    """Write a page with `runs` side by side to `path`, and make its folder.

    Raises:
        OSError: `path` cannot be written.
    """
    limits = find_limits([run.numerics for run in runs if run.numerics])
    data = {
        "statistics": [_make_statistic(stat, limits[stat.name]) for stat in STATISTICS if stat.name in limits],
        "colors": make_palette(),
        "special": SPECIAL_COLORS,
        "runs": [_make_run(run, limits, 1 / len(runs)) for run in runs],
    }
    write_page(path, _PAGE_FILES, title=" and ".join(run.label for run in runs), data=data)


def _make_statistic(statistic: Statistic, limits: tuple[float, float]) -> dict[str, Any]:
    fields = {field: getattr(statistic, field) for field in ("name", "title", "unit", "is_low_worse", "scale")}
    return fields | {"limits": limits}


def _make_run(run: RunData, limits: Limits, share: float) -> dict[str, Any]:
    record = run.numerics
    curves = {name: collect_curves(run.records, name) for name in CURVE_NAMES}
    memory_label, curves["memory"] = select_memory_curves(run)
    return {
        "label": run.label,
        "headline": describe_health(run),
        "is_healthy": is_healthy(run),
        "notes": run.notes,
        "facts": list_facts(run),
        "curves": {name: [asdict(thin_curve(curve)) for curve in full] for name, full in curves.items()},
        "memory_label": memory_label,
        "events": _list_events(run),
        "alarms": run.alarms,
        "numerics": make_maps(record, run.alarms, limits, share) if record else None,
        "conversion": run.conversion,
        "starts": run.starts,
    }


def _list_events(run: RunData) -> list[tuple[int, str]]:
    """Return the skipped steps, the step whose non-finite numbers ended the run, and the spikes of the loss."""
    texts = {RecordKind.SKIPPED_STEP: "skipped", RecordKind.NONFINITE_STEP: "not finite"}
    events = [
        (record["step"], f"{texts[record['kind']]}: {record.get('reason', '')}")
        for record in run.records
        if record.get("kind") in texts
    ]
    return events + [(record["step"], "loss spike") for record in run.records if record.get("loss_spike")]
