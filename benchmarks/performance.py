"""The tables of docs/performance.md (predicted) and docs/experiments/performance.md (measured on a CPU).

    python -m benchmarks.performance --update-docs                        the pages again, from the recorded files
    python -m benchmarks.performance --predict --update-docs              predict again first
    python -m benchmarks.performance --measure [linear ...] --update-docs measure all, or these benchmarks, first

Predictions are in benchmarks/results/roofline/, measurements in benchmarks/results/cpu/. Measure on a quiet
machine; one thread is used. torchao is measured if it is installed.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, make_markdown_table, run_quaver, show_tables
from quaver.kernels.native_mm import ScaleKind
from quaver.roofline.device_specs import DEVICE_SPECS
from quaver.roofline.matmul import MATMUL_SHARES
from quaver.roofline.scaled_matmul import get_scales_share

DOCS = ROOT / "docs" / "performance.md"
EXPERIMENTS = ROOT / "docs" / "experiments" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
ROOFLINE, CPU = RESULTS / "roofline", RESULTS / "cpu"
DEVICES = ("H100", "H200", "B200", "MI300X", "A100")
STEP_SHARE = "0.7"
"""The share of linears in the time of a bfloat16 step for which the page has step speedups."""
COMMANDS = {
    "linear": "linear --shapes 1024 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
    "train": "train --rounds 12 --recipes tensorwise rowwise rowwise_with_gw_hp delayed",
}
MODES = ("eager", "compiled")

Rows = list[dict[str, Any]]


def make_command(name: str) -> list[str]:
    """Return the arguments of `quaver` that measure one benchmark."""
    output = (CPU / f"{name}.json").relative_to(ROOT)
    return ["bench", *COMMANDS[name].split(), "--device", "cpu", "--threads", "1", "--output", str(output)]


def read_rows(folder: Path = ROOFLINE) -> Rows:
    """Return the predictions in the CSV."""
    with (folder / "roofline.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read(file: Path) -> dict[str, Any]:
    """Return a recorded result."""
    return json.loads(file.read_text(encoding="utf-8"))


def make_recorded_tables() -> dict[Path, dict[str, str]]:
    """Return the tables of each page from the recorded files."""
    layers = [row for row in read_rows() if (row["model"], row["recipe"]) == ("llama-8b", "tensorwise")]
    totals = read(ROOFLINE / "roofline.json")["totals"]
    measured = {f"cpu {name}": _MEASURED[name](read(CPU / f"{name}.json")["rows"]) for name in COMMANDS}
    return {
        DOCS: {"layers": _make_layers_table(layers), "totals": _make_totals_table(totals)},
        EXPERIMENTS: {"devices": _make_devices_table(), **measured},
    }


def _make_devices_table() -> str:
    lines = []
    for spec in DEVICE_SPECS:
        shares = MATMUL_SHARES[spec.name]
        float8 = ("none", "") if spec.float8_tflops is None else (f"{spec.float8_tflops:g}", f"{shares.float8:.1%}")
        bfloat16 = (f"{spec.bfloat16_tflops:g}", f"{shares.bfloat16:.1%}")
        rows = "" if spec.float8_tflops is None else f"{get_scales_share(ScaleKind.ROWWISE, spec):.2f}"
        lines.append([spec.name, *bfloat16, *float8, rows, f"{spec.memory_gb_per_s:g}"])
    heads = ["device", "bfloat16 TFLOP/s", "reached", "float8 TFLOP/s", "reached", "rowwise", "GB/s"]
    return make_markdown_table(heads, lines)


def _make_layers_table(rows: Rows) -> str:
    """Return a table of speedups, with a line for each layer and a column for each device."""
    devices, by_cell, lines = _list_values(rows, "device"), _group_rows(rows, "layer", "device"), []
    for layer, row in _group_rows(rows, "layer").items():
        cells = [f"{float(by_cell[*layer, device]['speedup']):.2f}" for device in devices]
        lines.append([*layer, f"{int(row['k']):,} -> {int(row['n']):,}", *cells])
    return make_markdown_table(["layer", "K -> N", *devices], lines)


def _make_totals_table(totals: Rows) -> str:
    """Return a table with a line for each model and recipe: the speedup of linears, and of a step in parentheses."""
    devices, by_cell, lines = _list_values(totals, "device"), _group_rows(totals, "model", "recipe", "device"), []
    for model, recipe in _group_rows(totals, "model", "recipe"):
        cells = [by_cell[model, recipe, device] for device in devices]
        figures = [f"{cell['speedup']:.2f} ({cell['step_speedup'][STEP_SHARE]:.2f})" for cell in cells]
        lines.append([model, recipe, *figures])
    return make_markdown_table(["model", "recipe", *devices], lines)


def _make_linear_table(rows: Rows) -> str:
    """Return a table with a line for each recipe and pairs of ratios, eager / compiled."""
    by_cell, peer, lines = _group_rows(rows, "mode", "library", "recipe"), "torchao_time_over_this", []
    for recipe in _list_values(rows, "recipe"):
        ours = [by_cell[mode, "quaver", recipe] for mode in MODES]
        lines.append(
            [
                f"`{recipe}`",
                _format_ratios(ours, "time_over_bfloat16"),
                _format_ratios(ours, peer) if ours[0][peer] else "",
            ]
        )
    return make_markdown_table(["eager / compiled", "time / bfloat16", "torchao's time / quaver's"], lines)


def _make_train_table(rows: Rows) -> str:
    lines = []
    for row in rows:
        ratios = (_format_ratios([row], f"{key}_over_high_precision") for key in ("time", "peak"))
        lines.append([f"`{row['precision']}`", f"{row['tokens_per_s']:,.0f}", *ratios])
    return make_markdown_table(["precision", "tokens/s", "time / bfloat16", "peak memory / bfloat16"], lines)


_MEASURED = {"linear": _make_linear_table, "train": _make_train_table}


def _format_ratios(rows: Rows, key: str) -> str:
    return " / ".join("" if row[key] is None else f"{row[key]:.2f}" for row in rows)


def _group_rows(rows: Rows, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}


def _list_values(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if row[key]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="predict first")
    parser.add_argument("--measure", nargs="*", choices=COMMANDS, metavar="NAME", help="measure these first, or all")
    parser.add_argument("--update-docs", action="store_true", help="fill the tables of both pages")
    options = parser.parse_args()
    commands = [make_command(name) for name in options.measure or COMMANDS] if options.measure is not None else []
    if options.predict:
        commands.append(["bench", "roofline", "--device", *DEVICES, "--pictures", "H200", "--output", str(ROOFLINE)])
    codes = [run_quaver(command) for command in commands]
    if any(codes):
        return max(codes)
    for page, tables in make_recorded_tables().items():
        show_tables(tables, page, update=options.update_docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
