"""Peak memory of a training step in float8 and in bfloat16, and the bytes that it saves for backward.

    python -m benchmarks.memory --update-docs              all 288 rows, into benchmarks/results/memory.{json,md}
    python -m benchmarks.memory --only linear eager        the rows that all of these words describe, to the terminal
    python -m benchmarks.memory --recorded --update-docs   the page again, from the recorded rows

Rows are modules x precisions x checkpointing x ranks x eager or compiled; words for --only are theirs, such as
"1 block", rowwise, full, "2 ranks", compiled. Runs on a CPU, or on a GPU where there is one, and starts its processes
itself; with more ranks than GPUs, rows on several ranks are left out.

memory_modules.py says what is measured, quaver/recorder/allocator.py how, memory_report.py makes the page.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.memory_modules import CHECKPOINTING, MODULES, PRECISIONS, Case, Size, measure
from benchmarks.memory_report import PAGE, PROMISED, RECORD, exceptions, name_of, page, tables
from benchmarks.record import on_ranks, provenance

RANKS = (1, 2)


def cases(words: list[str]) -> list[Case]:
    """All cases that every one of `words` describes, bfloat16 before the recipes that are compared with it."""
    product = itertools.product(RANKS, (False, True), MODULES, CHECKPOINTING, PRECISIONS)
    made = [Case(module, precision, mode, ranks, compiled) for ranks, compiled, module, mode, precision in product]
    return [case for case in made if set(words) <= words_of(case)]


def words_of(case: Case) -> set[str]:
    """What --only may call the case."""
    ranks = "1 rank" if case.ranks == 1 else f"{case.ranks} ranks"
    return {case.module, case.precision, case.checkpointing, ranks, "compiled" if case.compiled else "eager"}


def measure_all(chosen: list[Case], size: Size, device_type: str) -> list[dict[str, Any]]:
    """Rows in the order of `chosen`: those of one number of ranks in processes of their own."""
    rows = []
    for ranks, group in itertools.groupby(chosen, key=lambda case: case.ranks):
        if device_type == "cuda" and ranks > torch.cuda.device_count():
            continue
        of_ranks = on_ranks(ranks, _measure_cases, list(group), size, device_type, device_type=device_type)
        rows += [_largest(of_one) for of_one in zip(*of_ranks, strict=True)]
    return rows


def _largest(of_ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One row of a case's rows on each rank: the most that any rank takes."""
    row = dict(of_ranks[0])
    for key in [key for key in row if key.endswith("_bytes") and row[key] is not None]:
        row[key] = max(of_rank[key] for of_rank in of_ranks)
    return row


def _measure_cases(mesh: Any, chosen: list[Case], size: Size, device_type: str) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")  # all left alone
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    rank = 0 if mesh is None else mesh.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    rows = []
    for case in chosen:
        start = time.monotonic()
        rows.append(measure_row(case, size, device, mesh))
        if rank == 0:
            print(f"{', '.join(map(str, asdict(case).values()))}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return rows


def measure_row(case: Case, size: Size, device: torch.device, mesh: Any = None) -> dict[str, Any]:
    """One row of the table: the case and its bytes."""
    torch.compiler.reset()
    resident, usage = measure(case, size, device, mesh)
    return {
        **asdict(case),
        "resident_bytes": resident,
        "added_peak_bytes": usage.peak_bytes,
        "added_tensor_peak_bytes": usage.tensor_peak_bytes,
        "saved_bytes": usage.saved_bytes,
    }


def results_of(rows: list[dict[str, Any]], size: Size, device_type: str, seconds: float) -> dict[str, Any]:
    """The rows, the sizes and the provenance."""
    about = provenance("memory", device_type, threads=1, minutes=round(seconds / 60, 1))
    return {"environment": about, "size": asdict(size), "rows": rows}


def as_json(results: dict[str, Any]) -> str:
    """Indented, with each row on one line."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in results["rows"])
    head = json.dumps({**results, "rows": []}, indent=2)
    return head.replace('"rows": []', f'"rows": [\n{rows}\n  ]') + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="measure the rows that all words describe"
    )
    parser.add_argument("--recorded", action="store_true", help=f"read {RECORD.name}; measure nothing")
    parser.add_argument("--update-docs", action="store_true", help=f"write {RECORD.name} and {PAGE.name}")
    options = parser.parse_args()
    chosen = cases(options.only)
    if not chosen:
        parser.error(f"no row is described by {' and '.join(options.only)}; see the top of benchmarks/memory.py")
    if not all(replace(case, precision=PRECISIONS[0]) in chosen for case in chosen):
        parser.error("--only compares with bfloat16: leave out words that name a recipe")
    if options.only and (options.recorded or options.update_docs):
        parser.error("--only measures a part, and the page is of all rows: leave out --recorded and --update-docs")
    if options.recorded:
        results = json.loads(RECORD.read_text())
    else:
        device_type, start = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic()
        rows = measure_all(chosen, Size(), device_type)
        results = results_of(rows, Size(), device_type, time.monotonic() - start)
        if options.update_docs:
            RECORD.write_text(as_json(results))
    print(tables(results["rows"]))
    if options.update_docs:
        PAGE.write_text(page(results))
    over = exceptions(results["rows"])
    for row in over:
        print(f"above {PROMISED} of bfloat16: {name_of(row)}", file=sys.stderr)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
