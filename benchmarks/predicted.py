"""The steps of the memory table as quaver.memory predicts them, next to their measurements.

    python -m benchmarks.predicted --update-docs               all rows of memory.json, into results/predicted.{json,md}
    python -m benchmarks.predicted --only "1 block" compiled   the rows that all these words describe, to the terminal
    python -m benchmarks.predicted --recorded --update-docs    the page again, from the recorded rows

Nothing is measured or trained, and no kernel is compiled: tensors are fake, and ranks are pretended. Exits with 1 if a
peak is off by more than WITHIN. The words are those of benchmarks/memory.py.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.memory import as_json, cases, words_of
from benchmarks.memory_modules import Case, Size, _step, build
from benchmarks.memory_report import HEADINGS, RECORD
from benchmarks.record import ROOT, markdown, provenance
from quaver.memory.faking.fakes import fake_tensors
from quaver.memory.predict import Prediction, predict_step
from quaver.trainer.config import Optimizer
from quaver.trainer.dry_run import pretended_mesh
from quaver.trainer.optimizer import build_optimizer
from quaver.trainer.parallel_dims import ParallelDims

PREDICTED = ROOT / "benchmarks" / "results" / "predicted.json"
PAGE = PREDICTED.with_suffix(".md")

WITHIN = 0.03
"""Of what was measured: how far a predicted peak may be from it."""
NAMED = 0.001
"""Rows that differ by more are named on the page."""

Row = dict[str, Any]


def predict(case: Case, size: Size) -> Prediction:
    """A training step of the case on the first of its ranks, on a CPU."""
    device = torch.device("cpu")
    with pretended_mesh(ParallelDims(shard=case.ranks)) as mesh, fake_tensors(compiled=case.compiled) as fakes:
        subject = build(case, size, device, mesh)
        optimizer = build_optimizer(subject, Optimizer())
        dtype = torch.float32 if "block" in case.module else torch.bfloat16
        source = torch.randn(size.sequences, size.seq_len, size.dim, dtype=dtype, requires_grad=True)
        return predict_step(lambda: _step(subject, optimizer, source, lambda: None), subject, optimizer, fakes)


def compare(measured: Row, size: Size) -> Row:
    """A row of the memory table, with what is predicted and what that is of the measurement."""
    case = Case(**{key: measured[key] for key in ("module", "precision", "checkpointing", "ranks", "compiled")})
    start = time.monotonic()
    prediction = predict(case, size)
    return {
        **asdict(case),
        "measured_peak_bytes": measured["added_tensor_peak_bytes"],
        "predicted_peak_bytes": prediction.step_peak_bytes,
        "peak": round(prediction.step_peak_bytes / measured["added_tensor_peak_bytes"], 5),
        "measured_saved_bytes": measured["saved_bytes"],
        "predicted_saved_bytes": prediction.saved_by_forward_bytes,
        "saved": round(prediction.saved_by_forward_bytes / measured["saved_bytes"], 5),
        "seconds": round(time.monotonic() - start, 2),
    }


def page(results: dict[str, Any]) -> str:
    """The rows as a page."""
    about, rows = results["environment"], results["rows"]
    differ = [row for row in rows if abs(row["peak"] - 1) > NAMED]
    off = f"\n\n{_named(differ)}" if differ else " none."
    return f"""\
# Memory of a training step, predicted and measured

Predicted on {about["date"]} in {about["minutes"]} minutes by `{about["command"]}`: {about["device"]}, torch
{about["torch"]}. Measured are the rows of [memory.md](memory.md), at commit
{results["measured_at"]}. This page is made from `predicted.json`.

A ratio is predicted over measured: **peak** of the most that tensors take in a step beyond parameters and optimizer
state, scratch of operations left out, **saved** of what is alive between forward and backward. On 2 ranks a measurement
is the least of eight steps, since gloo's threads free buffers at chance moments, and single rows are above.
{_changed(results)}
{_summary(rows)}

Rows whose peak differs by more than {NAMED:.1%}:{off}
"""


def _changed(results: dict[str, Any]) -> str:
    if not results["code_has_changed"]:
        return ""
    return (
        "\n**The code that is measured has changed since that commit**, so that rows may differ for that reason:\n"
        "measure again before taking a difference for an error of the prediction.\n"
    )


def _has_changed_since(measured: dict[str, Any]) -> bool | None:
    """Whether the measured code is another than at the commit of that environment; None if git cannot tell."""
    commit = measured["commit"].removesuffix("+")  # which stands for changes anywhere in the tree
    command = ["git", "diff", "--quiet", commit, "--", "quaver", "benchmarks/memory_modules.py"]
    try:
        code = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    except OSError:
        return None
    return bool(code or measured["uncommitted_changes_in_quaver"]) if code in (0, 1) else None


def _summary(rows: list[Row]) -> str:
    lines = []
    for (ranks, compiled), heading in HEADINGS.items():
        here = [row for row in rows if (row["ranks"], row["compiled"]) == (ranks, compiled)]
        if not here:
            continue
        same = sum(abs(row["predicted_peak_bytes"] - row["measured_peak_bytes"]) <= _A_FEW_BYTES for row in here)
        seconds = sorted(row["seconds"] for row in here)
        lines.append(
            [heading, len(here), _range(here, "peak"), same, _range(here, "saved"), seconds[len(seconds) // 2]]
        )
    head = ["rows", "number", "peak", f"peaks within {_A_FEW_BYTES} bytes", "saved", "median seconds of a prediction"]
    return markdown(head, lines)


_A_FEW_BYTES = 64


def _range(rows: list[Row], figure: str) -> str:
    return f"{min(row[figure] for row in rows):.3f} to {max(row[figure] for row in rows):.3f}"


def _named(rows: list[Row]) -> str:
    lines = [
        [HEADINGS[row["ranks"], row["compiled"]], row["module"], row["precision"], row["checkpointing"]]
        + [f"{row['measured_peak_bytes']:,}", f"{row['predicted_peak_bytes']:,}", f"{row['peak']:.3f}"]
        for row in rows
    ]
    return markdown(["where", "module", "precision", "checkpointing", "measured", "predicted", "ratio"], lines)


def _compared(chosen: list[Case], measured: list[Row], size: Size) -> Iterator[Row]:
    by_case = {tuple(row[key] for key in asdict(chosen[0])): row for row in measured}
    for case in chosen:
        row = compare(by_case[tuple(asdict(case).values())], size)
        words = ", ".join(sorted(words_of(case)))
        print(f"{words}: peak {row['peak']:.4f}, saved {row['saved']:.4f}", file=sys.stderr)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="the rows that all words describe")
    parser.add_argument("--recorded", action="store_true", help=f"read {PREDICTED.name}; predict nothing")
    parser.add_argument("--update-docs", action="store_true", help=f"write {PREDICTED.name} and {PAGE.name}")
    options = parser.parse_args()
    chosen = cases(options.only)
    if not chosen:
        parser.error(f"no row is described by {' and '.join(options.only)}; see the top of benchmarks/memory.py")
    if options.only and (options.update_docs or options.recorded):
        parser.error("--only compares a part, and the page is of all rows: leave out --update-docs and --recorded")
    if options.recorded:
        results = json.loads(PREDICTED.read_text())
    else:
        results = _results(chosen)
        if options.update_docs:
            PREDICTED.write_text(as_json(results))
    if options.update_docs:
        PAGE.write_text(page(results))
    print(_summary(results["rows"]))
    off = [row for row in results["rows"] if abs(row["peak"] - 1) > WITHIN]
    if off:
        print(f"off by more than {WITHIN:.0%}:\n{_named(off)}", file=sys.stderr)
    return bool(off)


def _results(chosen: list[Case]) -> dict[str, Any]:
    """The rows and their provenance."""
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")  # all left alone
    record, start = json.loads(RECORD.read_text()), time.monotonic()
    rows = list(_compared(chosen, record["rows"], Size(**record["size"])))
    about = provenance("predicted", minutes=round((time.monotonic() - start) / 60, 1))
    measured = record["environment"]
    changed = _has_changed_since(measured)
    return {"environment": about, "measured_at": measured["commit"], "code_has_changed": changed, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
