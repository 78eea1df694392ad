"""Writes the report of runs as one HTML file that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from quaver.lab.page import Parts, write_page
from quaver.lab.report.facts import facts_of, headline, is_healthy, memory_curves
from quaver.lab.report.maps import Limits, limits_of, maps_of
from quaver.lab.report.palette import SPECIAL, palette
from quaver.lab.report.run import RunData
from quaver.lab.report.series import Curve, curves, thinned
from quaver.lab.report.statistics import STATISTICS

_PARTS = Parts(
    files("quaver.lab.report") / "page",
    scripts=("chart.js", "cells.js", "heatmap.js", "heatmaps.js", "distribution.js", "tables.js", "main.js"),
    kind="Report of a training run",
    footer="Made by quaver report. A cell of a heat map is one of 252 steps of its scale; tables have exact numbers.",
)


def write_report(path: Path, runs: Sequence[RunData]) -> None:
    """Write a page with `runs` side by side to `path`, and make its folder.

    Raises:
        OSError: `path` cannot be written.
    """
    limits = limits_of([run.numerics for run in runs if run.numerics])
    data = {
        "statistics": [_statistic(name, limits) for name in limits],
        "colors": palette(),
        "special": SPECIAL,
        "runs": [_run(run, limits, 1 / len(runs)) for run in runs],
    }
    write_page(path, _PARTS, title=" and ".join(run.label for run in runs), data=data)


def _statistic(name: str, limits: Limits) -> dict[str, Any]:
    (statistic,) = (known for known in STATISTICS if known.name == name)
    fields = {field: getattr(statistic, field) for field in ("name", "title", "unit", "is_low_worse", "scale")}
    return fields | {"limits": limits[name]}


def _run(run: RunData, limits: Limits, share: float) -> dict[str, Any]:
    record = run.numerics
    memory_label, memory = memory_curves(run)
    return {
        "label": run.label,
        "headline": headline(run),
        "is_healthy": is_healthy(run),
        "notes": run.notes,
        "facts": facts_of(run),
        "curves": {name: _curves(curves(run.records, name)) for name in ("loss", "grad_norm", "tokens_per_s")}
        | {"validation_loss": _curves(curves(run.records, "validation_loss")), "memory": _curves(memory)},
        "memory_label": memory_label,
        "events": _events(run),
        "alarms": run.alarms,
        "numerics": maps_of(record, run.alarms, limits, share) if record else None,
        "conversion": run.conversion,
        "starts": run.starts,
    }


def _curves(full_curves: Sequence[Curve]) -> list[dict[str, Any]]:
    return [asdict(thinned(curve)) for curve in full_curves]


def _events(run: RunData) -> list[tuple[int, str]]:
    """Return the skipped steps and the spikes of the loss."""
    skipped = [(record["step"], f"skipped: {record['skipped']}") for record in run.records if "skipped" in record]
    return skipped + [(record["step"], "loss spike") for record in run.records if record.get("loss_spike")]
