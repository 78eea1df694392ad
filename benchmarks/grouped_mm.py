"""Forward and backward of grouped matmuls: quaver's recipes against bfloat16 and torchao's emulated MXFP8.

    python -m benchmarks.grouped_mm --update-docs              writes benchmarks/results/grouped_mm.json and the table
                                                               of docs/experiments/performance.md
    python -m benchmarks.grouped_mm --recorded --update-docs   the table again, from the recorded times

Eight experts whose groups of tokens are ragged, on one thread of a CPU. Contestants alternate in one process.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import ROOT, describe_provenance, make_markdown_table, make_page_parser, record_and_show
from quaver import float8_grouped_mm
from quaver.lab.bench.harness import time_alternating

RECORD = ROOT / "benchmarks" / "results" / "grouped_mm.json"
PAGE = ROOT / "docs" / "experiments" / "performance.md"
EXPERTS = 8
SHAPES = ((1024, 512, 512), (1024, 1024, 1024), (8192, 1024, 1024))
"""Tokens, K, N."""
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
ROUNDS = 12
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def load_torchao_mxfp8() -> Multiply:
    """Return torchao's differentiable MXFP8 grouped matmul, emulated."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return lambda a, b_t, offs: _to_mxfp8_then_scaled_grouped_mm(
        a, b_t, offs, kernel_preference=KernelPreference.EMULATED
    )


def make_contestants() -> dict[str, Multiply]:
    """Return the grouped matmuls by name, bfloat16 first."""
    multiply_by: dict[str, Multiply] = {"bfloat16": lambda a, b_t, offs: F.grouped_mm(a, b_t, offs=offs)}
    for recipe in RECIPES:
        multiply_by[recipe] = lambda a, b_t, offs, recipe=recipe: float8_grouped_mm(a, b_t, offs, config=recipe)
    return multiply_by | {"torchao mxfp8, emulated": load_torchao_mxfp8()}


def make_steps(tokens: int, k: int, n: int) -> dict[str, Callable[[], None]]:
    """Return functions that run forward and backward of each contestant, on the same operands."""
    torch.manual_seed(0)
    a, grad_output = (torch.randn(tokens, columns, dtype=torch.bfloat16) for columns in (k, n))
    weight = torch.randn(EXPERTS, n, k, dtype=torch.bfloat16, requires_grad=True)
    a.requires_grad_()
    ends = torch.randint(tokens + 1, (EXPERTS,)).sort().values.int()
    ends[-1] = tokens

    def step(multiply: Multiply) -> None:
        a.grad = weight.grad = None
        multiply(a, weight.transpose(1, 2), ends).backward(grad_output)

    return {name: functools.partial(step, multiply) for name, multiply in make_contestants().items()}


def measure() -> dict[str, Any]:
    """Measure the median microseconds of each contestant for each shape."""
    torch.set_num_threads(1)
    rows = []
    for tokens, k, n in SHAPES:
        timings = time_alternating(make_steps(tokens, k, n), torch.device("cpu"), rounds=ROUNDS)
        us = {name: round(timing.median_us, 1) for name, timing in timings.items()}
        rows.append({"tokens": tokens, "k": k, "n": n, "us": us})
    return {"environment": describe_provenance("grouped_mm"), "rows": rows}


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of times and ratios, in Markdown."""
    names = list(results["rows"][0]["us"])
    lines = []
    for row in results["rows"]:
        bfloat16_us = row["us"]["bfloat16"]
        shape = f"{row['tokens']} x {row['k']} x {row['n']}"
        lines.append(
            [shape, f"{bfloat16_us / 1e3:.1f} ms", *(f"{row['us'][name] / bfloat16_us:.2f}" for name in names[1:])]
        )
    return {"grouped matmuls": make_markdown_table(["tokens x K x N, 8 experts", *names], lines)}


def main() -> None:
    record_and_show(make_page_parser(__doc__).parse_args(), measure, RECORD, make_tables, PAGE)


if __name__ == "__main__":
    main()
