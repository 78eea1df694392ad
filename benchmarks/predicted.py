"""The recorded rows of the memory table next to what quaver.memory predicts of them.

    python -m benchmarks.predicted                             all rows of results/memory.json, in some 15 minutes
    python -m benchmarks.predicted --only "1 block" compiled   the rows that all these words describe

Nothing is measured or trained, and no kernel is compiled: tensors are fake, and ranks are pretended. Exits with 1 if a
peak is off by more than WITHIN. The words are those of benchmarks/memory.py.
"""

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.memory import cases
from benchmarks.memory_modules import Case, Size, _step, build
from benchmarks.memory_report import HEADINGS, RECORD, name_of
from benchmarks.record import markdown
from quaver.memory.faking.fakes import fake_tensors
from quaver.memory.predict import Prediction, predict_step
from quaver.trainer.config import Optimizer
from quaver.trainer.dry_run import pretended_mesh
from quaver.trainer.optimizer import build_optimizer
from quaver.trainer.parallel_dims import ParallelDims

WITHIN = 0.03
"""Of what was measured: how far a predicted peak may be from it."""
A_FEW_BYTES = 64

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
    """A row of the memory table, with what is predicted over what was measured, and the difference of the peaks."""
    case = Case(**{key: measured[key] for key in ("module", "precision", "checkpointing", "ranks", "compiled")})
    prediction = predict(case, size)
    peak_bytes = measured["added_tensor_peak_bytes"]
    return {
        **asdict(case),
        "peak": prediction.step_peak_bytes / peak_bytes,
        "peak_difference_bytes": prediction.step_peak_bytes - peak_bytes,
        "saved": prediction.saved_by_forward_bytes / measured["saved_bytes"],
    }


def summary(rows: list[Row]) -> str:
    """A line for each way to run."""
    lines = []
    for (ranks, compiled), heading in HEADINGS.items():
        here = [row for row in rows if (row["ranks"], row["compiled"]) == (ranks, compiled)]
        if here:
            same = sum(abs(row["peak_difference_bytes"]) <= A_FEW_BYTES for row in here)
            lines.append([heading, len(here), _range(here, "peak"), same, _range(here, "saved")])
    return markdown(["rows", "number", "peak", f"peaks within {A_FEW_BYTES} bytes", "saved"], lines)


def _range(rows: list[Row], figure: str) -> str:
    return f"{min(row[figure] for row in rows):.3f} to {max(row[figure] for row in rows):.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="the rows that all words describe")
    options = parser.parse_args()
    chosen = cases(options.only)
    if not chosen:
        parser.error(f"no row is described by {' and '.join(options.only)}; see the top of benchmarks/memory.py")
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")  # all left alone
    record = json.loads(RECORD.read_text())
    by_case = {tuple(row[key] for key in asdict(chosen[0])): row for row in record["rows"]}
    rows = []
    for case in chosen:
        rows.append(compare(by_case[tuple(asdict(case).values())], Size(**record["size"])))
        print(f"{name_of(rows[-1])}: peak {rows[-1]['peak']:.4f}, saved {rows[-1]['saved']:.4f}", flush=True)
    print(summary(rows))
    return any(abs(row["peak"] - 1) > WITHIN for row in rows)


if __name__ == "__main__":
    sys.exit(main())
