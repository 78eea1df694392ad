"""`quaver bench gemm [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.gemm import GRANULARITIES, bench_gemm
from quaver.bench.shapes import parse_shapes
from quaver.cli.bench.options import BenchOptions, parse_bench, surroundings
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1, OneOf


@dataclass(frozen=True)
class Gemm(BenchOptions):
    """The three matmuls of a linear, without casts: float8 against bfloat16."""

    shapes: str = "1024"
    """Linears: sizes (1024), M x K x N (512x1024x4096) or models (llama-8b, llama-70b), with commas between."""
    tokens: AtLeast1 = 2048
    """M of a model's linears."""
    divisor: AtLeast1 = 1
    """Divide K and N of a model's linears by this."""
    scales: tuple[Annotated[str, OneOf(tuple(GRANULARITIES))], ...] = tuple(GRANULARITIES)
    """Granularities of the scales."""


def run(argv: list[str]) -> int:
    """Time matmuls as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Gemm, argv, "gemm")
        shapes = parse_shapes(options.shapes, tokens=options.tokens, divisor=options.divisor)
        around = surroundings(options)
    result = bench_gemm(
        shapes,
        options.scales,
        device=around.device,
        rounds=options.rounds,
        report=around.report,
    )
    columns = [
        ("shape", field("shape")),
        ("gemm", field("gemm")),
        ("M x K x N", lambda row: f"{row['m']} x {row['k']} x {row['n']}"),
        ("operands", field("contestant")),
        ("backend", field("backend")),
        *TIMES,
        ("TFLOP/s", number("tflops_per_s", ".3g")),
        ("of peak", number("share_of_peak", ".0%")),
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
    ]
    no_peak = "unknown: quaver/devices.py has no data sheet for this device"
    peak = no_peak if result["peak"] == "unknown" else result["peak"]
    return finish(around, result, columns, f"peak: {peak}")
