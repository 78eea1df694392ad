"""Measures the peak memory of training steps in float8 and in bfloat16, and the bytes saved for backward.

    python -m benchmarks.memory --update-docs              all 576 rows, into benchmarks/results/memory.{json,md}, and
                                                           docs/images/memory.png
    python -m benchmarks.memory --only linear eager        the rows that all of these words describe, to the terminal
    python -m benchmarks.memory --recorded --update-docs   the page again, from the recorded rows
    python -m benchmarks.memory --predict [--only ...]     the recorded rows as quaver.lab.memory predicts them

Rows are modules x precisions x checkpointing x ranks x eager or compiled. --only takes words that describe rows:
"1 block", rowwise, full, "2 ranks", compiled. Runs on a GPU if there is one, else on a CPU, and starts its own
processes. With more ranks than GPUs, rows on several ranks are left out. Exits with 1 if a peak is above
MAX_PEAK_RATIO times bfloat16's, or if a prediction is off by more than MAX_PREDICTION_ERROR.

memory_modules.py defines what is measured; quaver/lab/recorder/allocator.py measures.
"""

import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.memory_modules import CHECKPOINTING, MODULES, PRECISIONS, Case, Size, measure, predict
from benchmarks.record import (
    ROOT,
    describe_provenance,
    make_markdown_table,
    make_page_parser,
    record_and_show,
    run_on_ranks,
)

RECORD = ROOT / "benchmarks" / "results" / "memory.json"
PAGE = ROOT / "benchmarks" / "results" / "memory.md"
PICTURE = ROOT / "docs" / "images" / "memory.png"
BASELINE = PRECISIONS[0]
HEADINGS = {
    (1, False): "One process, eager",
    (1, True): "One process, compiled",
    (2, False): "FSDP2 on 2 ranks, eager",
    (2, True): "FSDP2 on 2 ranks, compiled",
}
MAX_PEAK_RATIO = 1.01
"""The promised limit of a float8 module's peak over bfloat16's. A lone linear is reported without a promise."""
MAX_PREDICTION_ERROR = 0.03
"""The largest relative error of a predicted peak."""
LISTED_PREDICTION_ERROR = 0.001
"""The relative error above which a prediction is listed."""
A_FEW_BYTES = 64

_VIEW_WARNING = r"FSDP2-wrapped module \(\w+\) returned a view tensor"  # harmless: no output is changed in place

Row = dict[str, Any]


def list_cases(words: list[str]) -> list[Case]:
    """Return the cases that all `words` describe, bfloat16 before the recipes that are compared with it."""
    product = itertools.product(HEADINGS, MODULES, CHECKPOINTING, PRECISIONS)
    all_cases = (Case(module, precision, mode, *where) for where, module, mode, precision in product)
    return [case for case in all_cases if set(words) <= list_words(case)]


def list_words(case: Case) -> set[str]:
    """Return the words by which --only describes the case."""
    ranks = "1 rank" if case.ranks == 1 else f"{case.ranks} ranks"
    return {case.module, case.precision, case.checkpointing, ranks, "compiled" if case.compiled else "eager"}


def parse_case(row: Row) -> Case:
    """Return the case of a row, which has its fields."""
    return Case(**{key: row[key] for key in Case.__dataclass_fields__})


def measure_all(chosen: list[Case], size: Size, device_type: str) -> list[dict[str, Any]]:
    """Measure rows in the order of `chosen`, in new processes for each number of ranks."""
    rows = []
    for ranks, group in itertools.groupby(chosen, key=lambda case: case.ranks):
        if device_type == "cuda" and ranks > torch.cuda.device_count():
            continue
        of_ranks = run_on_ranks(ranks, _measure_cases, list(group), size, device_type, device_type=device_type)
        rows += [_reduce_ranks(of_one) for of_one in zip(*of_ranks, strict=True)]
    return rows


def _reduce_ranks(of_ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return one row from the rows of a case on each rank: the largest bytes of any rank."""
    row = dict(of_ranks[0])
    for key in [key for key in row if key.endswith("_bytes") and row[key] is not None]:
        row[key] = max(of_rank[key] for of_rank in of_ranks)
    return row


def _measure_cases(mesh: Any, chosen: list[Case], size: Size, device_type: str) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", message=_VIEW_WARNING)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    rank = 0 if mesh is None else mesh.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    rows = []
    for case in chosen:
        start = time.monotonic()
        rows.append(measure_row(case, size, device, mesh))
        if rank == 0:
            print(f"{', '.join(map(str, astuple(case)))}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return rows


def measure_row(case: Case, size: Size, device: torch.device, mesh: Any = None) -> dict[str, Any]:
    """Return a row of the table: the case and its measured bytes."""
    torch.compiler.reset()
    resident, usage = measure(case, size, device, mesh)
    return {
        **asdict(case),
        "resident_bytes": resident,
        "added_peak_bytes": usage.peak_bytes,
        "added_tensor_peak_bytes": usage.tensor_peak_bytes,
        "saved_bytes": usage.saved_bytes,
    }


def find_baseline(row: Row, rows: list[Row]) -> Row:
    """Return the row that differs from `row` only in its precision, bfloat16."""
    wanted = replace(parse_case(row), precision=BASELINE)
    return next(candidate for candidate in rows if parse_case(candidate) == wanted)


def make_name(row: Row) -> str:
    """Describe a row in words."""
    ranks = "1 process" if row["ranks"] == 1 else f"FSDP2 on {row['ranks']} ranks"
    how = "compiled" if row["compiled"] else "eager"
    return f"{row['module']}, {row['precision']}, checkpointing {row['checkpointing']}, {ranks}, {how}"


def get_peak(row: Row) -> int:
    """Return the bytes that a step adds at its peak, without scratch if the peak of tensors is known."""
    tensors: int | None = row["added_tensor_peak_bytes"]
    everything: int = row["added_peak_bytes"]
    return everything if tensors is None else tensors


def find_exceptions(rows: list[Row]) -> list[Row]:
    """Return the float8 rows, except lone linears, whose peak breaks the promise."""
    promised = (row for row in rows if row["precision"] != BASELINE and row["module"] != "linear")
    return [row for row in promised if compute_ratios(row, rows)["peak"] > MAX_PEAK_RATIO]


def compute_ratios(row: Row, rows: list[Row]) -> dict[str, Any]:
    """Return ratios of `row` to its bfloat16 row: the peak, the peak with scratch, and the bytes saved for backward."""
    base = find_baseline(row, rows)
    return {
        "peak": get_peak(row) / get_peak(base),
        "peak_with_scratch": row["added_peak_bytes"] / base["added_peak_bytes"],
        "saved": row["saved_bytes"] / base["saved_bytes"],
    }


def make_tables(results: Row) -> dict[str, str]:
    """Return the tables of the page by name: the provenance, one per heading that has rows, and the broken promises."""
    rows, origin = results["rows"], results["environment"]
    changed = " with changes that were not committed" if origin["uncommitted_changes_in_quaver"] else ""
    by_name = {
        "provenance": f"Measured on {origin['date']} in {origin['minutes']:.0f} minutes by `{origin['command']}`: "
        f"{origin['device']}, {origin['threads']} thread, Python {origin['python']}, torch {origin['torch']}, "
        f"commit {origin['commit']}{changed}."
    }
    by_name |= {HEADINGS[where]: _make_table(here, rows) for where, here in _group_by_heading(rows)}
    above = [
        f"- {make_name(row)}: {get_peak(row):,} bytes, bfloat16 {get_peak(find_baseline(row, rows)):,}"
        for row in find_exceptions(rows)
    ]
    return by_name | {f"above {MAX_PEAK_RATIO}": "\n".join(above or ["none"])}


def _group_by_heading(rows: list[Row]) -> list[tuple[tuple[int, bool], list[Row]]]:
    groups = [(where, [row for row in rows if (row["ranks"], row["compiled"]) == where]) for where in HEADINGS]
    return [(where, here) for where, here in groups if here]


def _make_table(here: list[Row], rows: list[Row]) -> str:
    head = ["module", "checkpointing", "bfloat16 peak, MB", "saved, MB"]
    head += [f"`{name}` {figure}" for name in PRECISIONS[1:] for figure in ("peak", "saved")]
    lines: list[list[str]] = []
    for row in here:
        if row["precision"] == BASELINE:
            peak, saved = (f"{figure / 1e6:.2f}" for figure in (get_peak(row), row["saved_bytes"]))
            lines.append([row["module"], row["checkpointing"], peak, saved])
        else:
            lines[-1] += _format_shares(row, rows)
    return make_markdown_table(head, lines)


def _format_shares(row: Row, rows: list[Row]) -> list[str]:
    of = compute_ratios(row, rows)
    differs = abs(of["peak_with_scratch"] - of["peak"]) >= 0.005
    scratch = f" ({of['peak_with_scratch']:.2f})" if differs else ""
    return [f"{of['peak']:.3f}{scratch}", f"{of['saved']:.3f}"]


def draw(rows: list[Row], picture: Path) -> None:
    """Draw bars of the peak and the saved bytes of ten compiled blocks without checkpointing, by recipe."""
    here = [row for row in rows if list_words(parse_case(row)) >= {"10 blocks", "none", "1 rank", "compiled"}]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), dpi=150)
    for offset, key, label, color in (
        (-0.2, "added_tensor_peak_bytes", "peak of the step", "#2f6690"),
        (0.2, "saved_bytes", "saved for backward", "#81c3d7"),
    ):
        places, sizes = [place + offset for place in range(len(here))], [row[key] / 1e6 for row in here]
        bars = axes.barh(places, sizes, height=0.38, label=label, color=color)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
    axes.set_yticks(range(len(here)), [row["precision"] for row in here])
    axes.invert_yaxis()
    axes.set_xlabel("MB beyond parameters and optimizer state")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    figure.savefig(picture, bbox_inches="tight")


def compare(measured: Row, size: Size) -> Row:
    """Predict a measured row. Returns its case, both peaks, and the ratios of prediction to measurement."""
    case, start = parse_case(measured), time.monotonic()
    prediction = predict(case, size)
    print(f"{', '.join(map(str, astuple(case)))}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return {
        **asdict(case),
        "measured_peak_bytes": measured["added_tensor_peak_bytes"],
        "predicted_peak_bytes": prediction.step_peak_bytes,
        "peak": prediction.step_peak_bytes / measured["added_tensor_peak_bytes"],
        "saved": prediction.saved_by_forward_bytes / measured["saved_bytes"],
    }


def compare_predictions(chosen: list[Case]) -> bool:
    """Compare recorded rows with their predictions, and print a summary; return whether no error is too large."""
    warnings.filterwarnings("ignore", message=_VIEW_WARNING)
    record = json.loads(RECORD.read_text())
    rows = [compare(row, Size(**record["size"])) for row in record["rows"] if parse_case(row) in chosen]
    lines = []
    for where, here in _group_by_heading(rows):
        same = sum(abs(row["predicted_peak_bytes"] - row["measured_peak_bytes"]) <= A_FEW_BYTES for row in here)
        lines.append([HEADINGS[where], len(here), _format_range(here, "peak"), same, _format_range(here, "saved")])
    print("Predicted over measured\n")
    print(make_markdown_table(["rows", "number", "peak", f"peaks within {A_FEW_BYTES} bytes", "saved"], lines))
    for row in rows:
        if abs(row["peak"] - 1) > LISTED_PREDICTION_ERROR:
            measured, predicted = row["measured_peak_bytes"], row["predicted_peak_bytes"]
            print(f"{make_name(row)}: measured {measured:,}, predicted {predicted:,}, {row['peak']:.3f}")
    return all(abs(row["peak"] - 1) <= MAX_PREDICTION_ERROR for row in rows)


def _format_range(rows: list[Row], figure: str) -> str:
    return f"{min(row[figure] for row in rows):.3f} to {max(row[figure] for row in rows):.3f}"


def measure_results(chosen: list[Case]) -> Row:
    """Measure the cases. Returns the rows, the sizes and the provenance."""
    device_type, start = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic()
    rows = measure_all(chosen, Size(), device_type)
    minutes = round((time.monotonic() - start) / 60, 1)
    origin = describe_provenance("memory", device_type, threads=1, minutes=minutes)
    return {"environment": origin, "size": asdict(Size()), "rows": rows}


def main() -> int:
    parser = make_page_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="the rows that all words describe")
    parser.add_argument("--predict", action="store_true", help=f"predict the rows of {RECORD.name}; measure nothing")
    options = parser.parse_args()
    chosen = list_cases(options.only)
    if not chosen:
        parser.error(f"no row is described by {' and '.join(options.only)}; see the top of benchmarks/memory.py")
    if (options.only or options.predict) and (options.recorded or options.update_docs):
        parser.error("--recorded and --update-docs are for all measured rows: leave out --only and --predict")
    if options.predict:
        return not compare_predictions(chosen)
    if not all(replace(case, precision=BASELINE) in chosen for case in chosen):
        parser.error("--only compares with bfloat16: leave out words that name a recipe")
    rows = record_and_show(options, lambda: measure_results(chosen), RECORD, make_tables, PAGE)["rows"]
    if options.update_docs:
        draw(rows, PICTURE)
    return bool(find_exceptions(rows))


if __name__ == "__main__":
    sys.exit(main())
