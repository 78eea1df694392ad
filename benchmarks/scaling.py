"""Dynamic, delayed and static scaling: the all-reduces of each, and how its scales fit; with pictures.

    python -m benchmarks.scaling --output benchmarks/results/scaling.json --update-docs
    python -m benchmarks.scaling --recorded --update-docs

The second draws the table and the pictures of docs/scaling.md again from the recorded figures. Runs on a CPU and starts
2 gloo processes. Inputs are seeded, and nothing is timed, so the figures do not depend on the machine.

scaling_costs.py counts, scaling_numerics.py has the scenarios, scaling_pictures.py draws.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, markdown, on_ranks, provenance, show
from benchmarks.scaling_costs import count_on_rank
from benchmarks.scaling_numerics import DIM, TOKENS, measure_numerics
from benchmarks.scaling_pictures import draw

RECORD = ROOT / "benchmarks" / "results" / "scaling.json"
DOCS = ROOT / "docs" / "scaling.md"
IMAGES = ROOT / "docs" / "images"
RANKS = 2


def measure() -> dict[str, Any]:
    """All figures, on one thread."""
    torch.set_num_threads(1)
    return {
        "environment": provenance("scaling", ranks=RANKS, backend="gloo"),
        "linear": {"tokens": TOKENS, "dim": DIM},
        "all_reduces": on_ranks(RANKS, count_on_rank)[0],
        **measure_numerics(),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Each table of the documentation by its name, in Markdown."""
    return {"all_reduces": _all_reduces_table(results)}


_PARALLEL = {
    "fsdp": "FSDP2, two blocks, float8 all-gather",
    "feed-forward": "tensor parallel feed-forward",
    "attention": "tensor parallel attention",
}


def _all_reduces_table(results: dict[str, Any]) -> str:
    """A line for each layout, a column for each recipe; in a cell the all-reduces by phase and their bytes."""
    recipes = list(dict.fromkeys(row["recipe"] for row in results["all_reduces"]))
    cells = {(row["parallel"], row["recipe"]): _all_reduces_cell(row) for row in results["all_reduces"]}
    rows = [[name, *(cells[parallel, recipe] for recipe in recipes)] for parallel, name in _PARALLEL.items()]
    return markdown(["layout", *(f"`{recipe}`" for recipe in recipes)], rows)


def _all_reduces_cell(row: dict[str, Any]) -> str:
    calls = [f"{phase} {count}" for phase, count in row["all_reduces"].items() if count]
    return ", ".join([*calls, f"{row['bytes']} bytes"]) if calls else "none"


def _json(results: dict[str, Any]) -> str:
    """Indented, with each series on one line."""
    series = re.compile(r"\[[^][{}]*\]")
    return series.sub(lambda found: " ".join(found.group().split()), json.dumps(results, indent=2)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--recorded", action="store_true", help=f"read {RECORD.relative_to(ROOT)}; measure nothing")
    parser.add_argument("--update-docs", action="store_true", help="rewrite the table and pictures of docs/scaling.md")
    options = parser.parse_args()
    results = json.loads(RECORD.read_text()) if options.recorded else measure()
    show(tables(results), DOCS, update=options.update_docs)
    if options.output is not None:
        options.output.write_text(_json(results))
    if options.update_docs:
        draw(results, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
