"""`quaver bench gemm [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.gemm import GRANULARITIES, bench_gemm
from quaver.cli.bench.options import BenchOptions, Shapes, parse_bench
from quaver.cli.bench.tables import TIMES, Column, finish
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import OneOf


@dataclass(frozen=True)
class Gemm(Shapes, BenchOptions):
    """The three matmuls of a linear, without casts: float8 against bfloat16."""

    scales: tuple[Annotated[str, OneOf(GRANULARITIES)], ...] = GRANULARITIES
    """Granularities of the scales."""


def run(argv: list[str]) -> int:
    """Time matmuls as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Gemm, argv)
        shapes = options.linears
        setup = options.setup()
    result = bench_gemm(setup, shapes, options.scales)
    columns = [
        Column("shape", "shape"),
        Column("gemm", "gemm"),
        Column("M x K x N", lambda row: f"{row['m']} x {row['k']} x {row['n']}"),
        Column("operands", "contestant"),
        Column("backend", "backend"),
        *TIMES,
        Column("TFLOP/s", "tflops_per_s", ".3g"),
        Column("of peak", "share_of_peak", ".0%"),
        Column("/ bfloat16", "time_over_bfloat16", ".2f"),
    ]
    no_peak = "unknown: quaver/devices.py has no data sheet for this device"
    return finish(options, result, columns, f"peak: {no_peak if result['peak'] == 'unknown' else result['peak']}")
