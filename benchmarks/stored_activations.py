"""Measures bytes and time of Llama blocks that store activations in float8, against blocks that keep them as they are.

    python -m benchmarks.stored_activations --update-docs              writes docs/activations.md's tables and
                                                                       benchmarks/results/stored_activations.json
    python -m benchmarks.stored_activations --recorded --update-docs   the tables again, from the recorded figures

The blocks and the step are the memory table's (memory_modules.py). Contestants alternate in one process on one thread.
"""

import json
import os
import statistics
import time
from typing import Any

import torch

from benchmarks import memory_modules
from benchmarks.memory_modules import Case, Size
from benchmarks.record import ROOT, describe_provenance, make_markdown_table, make_page_parser, record_and_show
from quaver.activations import store_activations_in_float8
from quaver.torch_private.compiler import recompile_limit

RECORD = ROOT / "benchmarks" / "results" / "stored_activations.json"
MEMORY_RECORD = ROOT / "benchmarks" / "results" / "memory.json"
PAGE = ROOT / "docs" / "activations.md"
RECIPES = ("bfloat16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
TIMED_SIZE = Size(dim=512, hidden_dim=1536, n_heads=8, n_kv_heads=4)
ROUNDS = 12
BLOCKS = 10
CPU = torch.device("cpu")


def build_subject(case: Case, size: Size, store: bool) -> memory_modules.StackedModules:
    """Return the blocks of a case, which store activations in float8 if `store`."""
    blocks = memory_modules.build(Case(case.module, case.precision), size, CPU, None)
    if store:
        store_activations_in_float8(blocks)
    if case.compiled:
        for part in blocks.parts:
            part.compile(fullgraph=True)
    return blocks


def count_bytes(case: Case, store: bool) -> dict[str, int]:
    """Return the bytes alive between forward and backward of ten blocks, and those that the step adds at its peak."""
    torch.compiler.reset()
    _, usage = memory_modules.measure(case, Size(), CPU, subject=build_subject(case, Size(), store))
    return {"saved": usage.saved_bytes, "peak": usage.tensor_peak_bytes or usage.peak_bytes}


def measure_times(compiled: bool) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of CPU time of a step of two blocks, kept and stored, by recipe."""
    torch.compiler.reset()
    steps, samples = {}, {}
    for recipe in RECIPES:
        for store in (False, True):
            case = Case("2 blocks", recipe, compiled=compiled)
            steps[recipe, store] = memory_modules.prepare(
                case, TIMED_SIZE, CPU, None, build_subject(case, TIMED_SIZE, store)
            )[2]
            for _ in range(2):  # compiles, and makes the optimizer's states
                steps[recipe, store]()
            samples[recipe, store] = []
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            samples[name].append(time.process_time() - start)
    return {
        recipe: {
            name: round(1e3 * statistics.median(samples[recipe, store]), 1) for name, store in STORE_BY_KIND.items()
        }
        for recipe in RECIPES
    }


STORE_BY_KIND = {"kept": False, "stored": True}


def measure() -> dict[str, Any]:
    """Measure bytes and milliseconds of each recipe, eager and compiled."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    rows = []
    for compiled in (False, True):
        with recompile_limit(len(RECIPES) * 2):
            times = measure_times(compiled)
        for recipe in RECIPES:
            case = Case(f"{BLOCKS} blocks", recipe, compiled=compiled)
            of_bytes = {name: count_bytes(case, store) for name, store in STORE_BY_KIND.items()}
            rows.append({"recipe": recipe, "compiled": compiled, "ms": times[recipe], **of_bytes})
    return {"environment": describe_provenance("stored_activations"), "rows": rows}


def read_memory_table(recipe: str, compiled: bool) -> dict[str, int]:
    """Return the saved bytes of the same blocks in the memory table, by activation checkpointing."""
    rows = json.loads(MEMORY_RECORD.read_text())["rows"]
    case = (f"{BLOCKS} blocks", recipe, compiled, 1)
    fields = ("module", "precision", "compiled", "ranks")
    return {row["checkpointing"]: row["saved_bytes"] for row in rows if tuple(row[field] for field in fields) == case}


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of ratios to bfloat16's bytes and times, and of bytes per token of a block."""
    lines = []
    per_token: dict[str, list[str]] = {recipe: [recipe] for recipe in RECIPES}
    for row in results["rows"]:
        base = next(first for first in results["rows"] if first["compiled"] == row["compiled"])  # bfloat16 is first
        shares = [row[kind][what] / base["kept"][what] for what in ("saved", "peak") for kind in STORE_BY_KIND]
        shares += [row["ms"][kind] / base["ms"]["kept"] for kind in STORE_BY_KIND]
        how = "compiled" if row["compiled"] else "eager"
        lines.append([f"{row['recipe']}, {how}", *(f"{share:.2f}" for share in shares)])
        checkpointed = read_memory_table(row["recipe"], row["compiled"])
        saved = [*(row[kind]["saved"] for kind in STORE_BY_KIND), checkpointed["op"], checkpointed["full"]]
        per_token[row["recipe"]] += [f"{size / BLOCKS / Size().tokens:,.0f}" for size in saved]
    head = ["", "saved, kept", "stored", "peak, kept", "stored", "time, kept", "stored"]
    of_tokens = ["", *(cell for how in ("eager", "compiled") for cell in (f"{how}, kept", "stored", "op", "full"))]
    return {
        "stored activations": make_markdown_table(head, lines),
        "bytes per token": make_markdown_table(of_tokens, list(per_token.values())),
    }


def main() -> None:
    record_and_show(make_page_parser(__doc__).parse_args(), measure, RECORD, make_tables, PAGE)


if __name__ == "__main__":
    main()
