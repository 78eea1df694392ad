"""Dynamic, delayed and static scaling: what each reads, sends and takes, and how its scales fit; with pictures.

    python -m benchmarks.scaling --output benchmarks/results/scaling.json --update-docs
    python -m benchmarks.scaling --recorded --update-docs

The second takes the recorded figures, and makes the tables and pictures of docs/scaling.md again. Runs on a CPU, needs
the C extension (which counts reads), and starts 2 gloo processes itself. All inputs are seeded. Counts and SQNR do not
depend on the machine's speed; times do.

scaling_costs.py counts and times, scaling_numerics.py has the scenarios, scaling_pictures.py draws.
"""

import argparse
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, fill, has_changed, markdown
from benchmarks.scaling_costs import RANKS, READS_SHAPE, measure_costs
from benchmarks.scaling_numerics import DIM, RESULTS, TOKENS, measure_numerics
from benchmarks.scaling_pictures import draw
from quaver.bench.harness import environment

RECORD = ROOT / "benchmarks" / "results" / "scaling.json"
DOCS = ROOT / "docs" / "scaling.md"
IMAGES = ROOT / "docs" / "images"


def measure() -> dict[str, Any]:
    """All figures, on one thread."""
    torch.set_num_threads(1)
    about = environment(torch.device("cpu"))
    command = shlex.join(["python", "-m", "benchmarks.scaling", *sys.argv[1:]])
    return {
        "environment": {**about, "ranks": RANKS, "backend": "gloo", "command": command}
        | {"uncommitted_changes_in_quaver": has_changed("quaver")},
        "linear": {"tokens": TOKENS, "dim": DIM},
        "reads_shape": READS_SHAPE,
        **measure_costs(),
        **measure_numerics(),
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Each table of the documentation by its name, in Markdown."""
    return {"all_reduces": _all_reduces_table(results)}


def _reads_table(results: dict[str, Any]) -> str:
    rows = []
    for row in results["reads"]:
        operands = [row[name] for name in ("input", "weight", "grad_output")]
        moved = sum(2 * operand["reads"] + operand["casts"] for operand in operands)
        cells = [f"{operand['reads']} ({operand['casts']})" for operand in operands]
        rows.append([f"`{row['recipe']}`", row["step"], *cells, sum(operand["reads"] for operand in operands), moved])
    head = ["scaling", "step", "input", "weight", "grad_output", "reads together", "bytes, by arithmetic"]
    return markdown(head, rows)


def _casts_table(results: dict[str, Any]) -> str:
    rows = []
    for row in results["casts"]:
        us = {name: row[name]["median_us"] for name in ("dynamic", "kept", "cold", "scale_only")}
        shape = " x ".join(map(str, row["shape"]))
        rows.append([row["dtype"].removeprefix("torch."), shape, *(f"{value:.0f}" for value in us.values())])
        rows[-1].append(f"{us['kept'] / us['dynamic']:.2f}")
    head = ["from", "shape", "dynamic, us", "kept scale, us", "scale not known, us", "scale only, us"]
    return markdown([*head, "kept over dynamic"], rows)


def _linears_table(results: dict[str, Any]) -> str:
    names = ("high precision", "tensorwise", "delayed", "delayed_with_dynamic_weight")
    rows = []
    for row in results["linears"]:
        of = {name: row["rows"][name] for name in names}
        times = [_spread(t["median_us"] / 1e3, t["p10_us"] / 1e3, t["p90_us"] / 1e3, 1) for t in of.values()]
        ratio = of["delayed"]["median_us"] / of["tensorwise"]["median_us"]
        rows.append([" x ".join(map(str, row["shape"])), *times, f"{ratio:.2f}"])
    head = ["M x K x N", "bfloat16, ms", *(f"`{name}`, ms" for name in names[1:]), "`delayed` over `tensorwise`"]
    return markdown(head, rows)


def _spread(middle: float, low: float, high: float, digits: int) -> str:
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


_PARALLEL = {
    "fsdp": "FSDP2, two blocks, float8 all-gather",
    "feed-forward": "tensor parallel feed-forward",
    "attention": "tensor parallel attention",
}


def _all_reduces_table(results: dict[str, Any]) -> str:
    rows = []
    for row in results["all_reduces"]:
        calls = [row["all_reduces"][phase] for phase in ("forward", "backward", "sync", "precompute")]
        rows.append([_PARALLEL[row["parallel"]], f"`{row['recipe']}`", *calls, row["bytes"]])
    return markdown(["layout", "recipe", "forward", "backward", "sync", "precompute", "bytes"], rows)


def _sync_table(results: dict[str, Any]) -> str:
    rows = []
    for row in results["sync"]:
        cells = [row["ranks"], row["linears"], f"{row['scales']:,}", row["operations"], row["all_reduces"]]
        times = [_spread(us["median"], us["min"], us["max"], 0) for us in row["us"].values()]
        rows.append([*cells, f"{row['bytes']:,}", *times])
    head = ["ranks", "linears", "scales", "operations", "all-reduces", "bytes", "us", "us, given `fp8_layers`"]
    return markdown(head, rows)


def _stationary_table(results: dict[str, Any]) -> str:
    rows = []
    for name in RESULTS:
        dynamic, delayed = (results["stationary"][recipe][name] for recipe in ("tensorwise", "delayed"))
        furthest = max(abs(a - b) for a, b in zip(dynamic, delayed, strict=True))
        rows.append([name, *(f"{sum(series) / len(series):.2f}" for series in (dynamic, delayed)), f"{furthest:.2f}"])
    return markdown(["result", "dynamic, mean dB", "delayed, mean dB", "largest difference in a step, dB"], rows)


SCENARIOS = {
    "growth": "doubles at 10 steps",
    "spike_1e3": "1,000 times as large for 1 step",
    "spike_1e6": "1,000,000 times as large for 1 step",
    "drift_up": "8 % larger each step",
    "drift_down": "25 % smaller each step",
}


def _scenarios_table(results: dict[str, Any]) -> str:
    rows = []
    for scenario, words in SCENARIOS.items():
        contestants = results["scenarios"][scenario]
        for name, series in contestants.items():
            best = contestants["dynamic"]["sqnr_db"]
            worse = sum(a < b - 1 for a, b in zip(series["sqnr_db"], best, strict=True))
            saturating = sum(share > 1e-3 for share in series["saturated"])
            fits = [math.log2(fit) for fit in series["used_over_ideal"]]
            cells = [f"{saturating} of {len(fits)}", f"{100 * max(series['saturated']):.3g} %", worse]
            rows.append([words, name, *cells, f"{min(series['sqnr_db']):.1f}", f"{min(fits):.1f} to {max(fits):.1f}"])
    head = ["input", "scaling", "steps that saturate", "elements at worst", "steps below dynamic", "lowest dB"]
    head += ["log2(used_over_ideal)"]
    return markdown(head, rows)


def _json(results: dict[str, Any]) -> str:
    """Indented, with each series on one line."""
    series = re.compile(r"\[[^][{}]*\]")
    return series.sub(lambda found: " ".join(found.group().split()), json.dumps(results, indent=2)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--recorded", action="store_true", help=f"read {RECORD.relative_to(ROOT)}; measure nothing")
    parser.add_argument("--update-docs", action="store_true", help="rewrite the tables and pictures of docs/scaling.md")
    options = parser.parse_args()
    results = json.loads(RECORD.read_text()) if options.recorded else measure()
    for name, table in tables(results).items():
        print(f"{name}\n{table}\n")
    if options.output is not None:
        options.output.write_text(_json(results))
    if options.update_docs:
        DOCS.write_text(fill(DOCS.read_text(), tables(results)))
        draw(results, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
