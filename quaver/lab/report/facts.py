"""The facts of a run in short, for the page and the terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from quaver.lab.report.maps import find_worst_cells
from quaver.lab.report.run import RunData
from quaver.lab.report.series import Curve, collect_curves
from quaver.lab.report.statistics import STATISTICS
from quaver.lab.runs.json_lines import RecordKind
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.lab.terminal.counts import format_count
from quaver.lab.trainer.step_statistics import compute_median_after_warmup
from quaver.numerics.history import make_order_key
from quaver.numerics.record import Record

MEMORY_LABELS = {
    "memory_active_bytes": "peak memory of tensors",
    "memory_peak_rss_bytes": "peak resident memory",
}
NO_STATISTICS_NOTE = "no statistics of float8 matmuls; --numerics.every 100 records them"


def select_memory_curves(run: RunData) -> tuple[str, list[Curve]]:
    """Return the curves of the memory that the run recorded, and their label."""
    by_label = ((label, collect_curves(run.records, name)) for name, label in MEMORY_LABELS.items())
    return next(((label, recorded) for label, recorded in by_label if recorded), ("", []))


def describe_health(run: RunData) -> str:
    """Say in one sentence whether the run is healthy, after the error that ended it if there was one."""
    health = _describe_numerics(run)
    return f"{describe_end(run)}; {health}" if has_failed(run) else health


def has_failed(run: RunData) -> bool:
    """Return whether an error ended the run."""
    return run.summary is not None and run.summary["status"].is_error


def describe_end(run: RunData) -> str:
    """Return how the run ended, such as "finished after step 400"; "" if no end is known."""
    if run.summary is None:
        return ""
    reason = f": {run.summary['reason']}" if run.summary["reason"] else ""
    return f"{run.summary['status']} after step {run.summary['steps']:,}{reason}"


def _describe_numerics(run: RunData) -> str:
    record = run.numerics
    if record is None:
        return NO_STATISTICS_NOTE
    samples, tensors = format_count(len(record.steps), "sample"), format_count(len(record.tensors), "tensor")
    where = f"{samples} of {tensors}, up to step {record.steps[-1]:,}"
    nonfinite = describe_first_nonfinite(record)
    if run.alarms:
        first, number = run.alarms[0], format_count(len(run.alarms), "alarm")
        return f"{number} in {where}; the first at step {first['step']:,}: {first['message']}"
    return f"no alarm in {where}" + (f"; but {nonfinite}" if nonfinite else "")


def is_healthy(run: RunData) -> bool | None:
    """Return whether no error ended the run and all measured values are fine; None if nothing was measured."""
    if has_failed(run):
        return False
    return None if run.numerics is None else not run.alarms and not describe_first_nonfinite(run.numerics)


def describe_first_nonfinite(record: Record) -> str:
    """Say when and where the first non-finite elements were seen; "" if there were none."""
    if "nonfinite" not in record.statistics:
        return ""
    is_nonfinite = record.statistics["nonfinite"] > 0
    if not is_nonfinite.any():
        return ""
    sample = int(is_nonfinite.any(1).argmax())
    layers = list(dict.fromkeys(tensor["layer"] for tensor in record.tensors))
    tensors = [record.tensors[position] for position in np.flatnonzero(is_nonfinite[sample]).tolist()]
    first = min(tensors, key=lambda tensor: make_order_key(layers.index(tensor["layer"]), tensor["operand"]))
    more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
    return f"NaN or infinities since step {record.steps[sample]:,}, in {format_tensor_name(first)}{more}"


def list_facts(run: RunData) -> list[tuple[str, str]]:
    """Return the names and values of the run's facts."""
    # Without a summary, the last record; with job.compare the other model may not have taken that step.
    recorded = (record["step"] for record in run.records if record.get("kind") != RecordKind.NONFINITE_STEP)
    steps = run.summary["steps"] if run.summary else max(recorded, default=0)
    facts = [("steps", f"{steps:,}")] if run.records else []
    if run.records and run.path.is_dir():
        facts.append(("end", describe_end(run) or "none written: the run goes on, was killed, or could not write it"))
    models = run.models

    def label_model(label: str, model: str) -> str:
        return label if model in ("", *models[:1]) else f"{label}, {model}"

    skipped = (record.get("model", "") for record in run.records if record.get("kind") == RecordKind.SKIPPED_STEP)
    facts += [(label_model("skipped steps", model), f"{count:,}") for model, count in Counter(skipped).items()]
    for key, label, format_values in (
        ("loss", "last loss", lambda values: f"{values[-1]:.4f}"),
        ("validation_loss", "validation loss", lambda values: f"{values[-1]:.4f}"),
        ("tokens_per_s", "median tokens/s", lambda values: f"{compute_median_after_warmup(values):,.0f}"),
    ):
        records = [record for record in run.records if key != "tokens_per_s" or not record.get("measures_memory")]
        for curve in collect_curves(records, key):
            facts.append((label_model(label, curve.model), format_values(curve.values)))
    label, memory = select_memory_curves(run)
    if memory:
        facts.append((label, format_bytes(max(max(curve.values) for curve in memory))))
    return [*facts, *_list_numerics_facts(run)]


def _list_numerics_facts(run: RunData) -> list[tuple[str, str]]:
    record = run.numerics
    if record is None:
        return []
    facts = [("alarms", f"{len(run.alarms):,}"), ("not finite", describe_first_nonfinite(record) or "0")]
    for statistic in STATISTICS:
        cells = find_worst_cells(record, statistic, 1) if statistic.name in record.statistics else []
        for tensor, step, value in cells:
            extreme = "lowest" if statistic.is_low_worse else "highest"
            where = "" if value == "0" else f", {format_tensor_name(record.tensors[tensor])}, step {step:,}"
            facts.append((f"{extreme} {statistic.title}", f"{value}{where}"))
    return facts


def format_tensor_name(tensor: dict[str, Any]) -> str:
    """Return a tensor's layer and operand."""
    return f"{tensor['layer']} {tensor['operand'].replace('_', ' ')}"
