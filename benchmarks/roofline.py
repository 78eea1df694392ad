"""The roofline's tables of docs/performance.md, from benchmarks/results/roofline/roofline.csv and .json.

    python -m benchmarks.roofline [--update-docs]                              from the recorded files
    python -m benchmarks.roofline --again [--measured JSON] [--update-docs]    after predicting again

`--measured` is the JSON of `quaver bench linear` on one of the devices: the files then also have measured speedups.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, markdown, show
from quaver.cli import main as quaver
from quaver.config import Float8LinearRecipeName
from quaver.devices import DEVICE_SPECS
from quaver.filters import MATMUL_SHARES, recipe_casts

DOCS = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "benchmarks" / "results" / "roofline"
DEVICES = ("H100", "H200", "B200", "MI300X", "A100")
PICTURES = ("H200",)
WORDS = ("bench", "roofline", "--device", *DEVICES)
STEP_SHARE = "0.7"
"""The share of a bfloat16 step's time that the linears take, on the page."""

Row = dict[str, str]


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """The predictions of the CSV."""
    with (folder / "roofline.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_json(folder: Path = FOLDER) -> dict[str, Any]:
    """Settings, totals and comparisons."""
    return json.loads((folder / "roofline.json").read_text(encoding="utf-8"))


def tables(rows: list[Row], result: dict[str, Any]) -> dict[str, str]:
    """Every table of the page, by name."""
    made = {"bytes": _bytes_table(), "devices": _devices_table(), "totals": _totals_table(result["totals"])}
    return made | {"layers": _layers_table([row for row in rows if row["model"] == "llama-8b"])}


def _bytes_table() -> str:
    head = ["recipe", "input", "weight", "weight, `cast_weights_once`", "grad_output", "kernels"]
    lines = []
    for recipe in Float8LinearRecipeName:
        input, weight, grad_output = recipe_casts(recipe)
        together = recipe_casts(recipe, microbatches=1)[1]
        kernels = sum(casts.kernels for casts in (input, weight, grad_output))
        numbers = [casts.bytes_per_element for casts in (input, weight, together, grad_output)]
        lines.append([f"`{recipe.value}`", *(f"{number:g}" for number in numbers), f"{kernels:g}"])
    return markdown(head, lines)


def _devices_table() -> str:
    head = ["device", "bfloat16 TFLOP/s", "reached", "float8 TFLOP/s", "reached", "GB/s"]
    lines = []
    for spec in DEVICE_SPECS:
        shares = MATMUL_SHARES[spec.name]
        float8 = ("none", "") if spec.float8_tflops is None else (f"{spec.float8_tflops:g}", f"{shares.float8:.1%}")
        lines.append(
            [spec.name, f"{spec.bfloat16_tflops:g}", f"{shares.bfloat16:.1%}", *float8, f"{spec.memory_gb_per_s:g}"]
        )
    return markdown(head, lines)


def _layers_table(rows: list[Row]) -> str:
    """A line for each layer, a column for each device, in a cell the speedups of all recipes."""
    devices, recipes = _in_order(rows, "device"), _in_order(rows, "recipe")
    found = {(row["layer"], row["device"], row["recipe"]): row["speedup"] for row in rows}
    shapes = {row["layer"]: f"{int(row['k']):,} -> {int(row['n']):,}" for row in rows}
    lines = [
        [
            layer,
            shape,
            *(" / ".join(f"{float(found[layer, device, each]):.2f}" for each in recipes) for device in devices),
        ]
        for layer, shape in shapes.items()
    ]
    return markdown(["layer", "K -> N", *devices], lines)


def _totals_table(totals: list[dict[str, Any]]) -> str:
    """A line for each model and recipe; in a cell the speedup of the linears, and of a step in parentheses."""
    devices = _in_order(totals, "device")
    found = {(total["model"], total["recipe"], total["device"]): total for total in totals}
    lines = []
    for model, recipe in dict.fromkeys((total["model"], total["recipe"]) for total in totals):
        cells = [found[model, recipe, device] for device in devices]
        figures = [f"{each['speedup']:.2f} ({each['step_speedup'][STEP_SHARE]:.2f})" for each in cells]
        lines.append([model, recipe, *figures])
    return markdown(["model", "recipe", *devices], lines)


def _in_order(rows: list[Any], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="predict first")
    parser.add_argument("--measured", type=Path, help="with --again: the JSON of quaver bench linear")
    parser.add_argument("--update-docs", action="store_true", help=f"rewrite the tables of {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.measured is not None and not options.again:
        parser.error("--measured needs --again: measured speedups stand next to new predictions")
    if options.again:
        measured = [] if options.measured is None else ["--measured", str(options.measured)]
        quaver([*WORDS, "--pictures", *PICTURES, "--output", str(FOLDER), *measured])
    show(tables(read_rows(), read_json()), DOCS, update=options.update_docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
