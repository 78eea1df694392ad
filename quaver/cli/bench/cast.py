"""`quaver bench cast [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.cast import KINDS, bench_cast
from quaver.bench.shapes import parse_matrices
from quaver.cli.bench.options import OperandOptions, Shapes, parse_bench
from quaver.cli.bench.tables import TIMES, Column, finish
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import OneOf


@dataclass(frozen=True)
class Cast(Shapes, OperandOptions):
    """Casts of one matrix, the input of a linear, to float8: quaver's, compiled PyTorch's, torchao's; and a copy."""

    shapes: str = "1024,2048x4096"
    """Sizes (1024), rows x columns (512x4096) or models (llama-8b, llama-70b), with commas between."""
    casts: tuple[Annotated[str, OneOf(tuple(KINDS))], ...] = tuple(KINDS)
    """Kinds of casts."""


def run(argv: list[str]) -> int:
    """Time casts as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Cast, argv)
        matrices = parse_matrices(options.shapes, tokens=options.tokens, divisor=options.divisor)
        setup = options.setup()
    result = bench_cast(setup, matrices, options.casts)
    columns = [
        Column("matrix", "matrix"),
        Column("cast", "cast"),
        Column("library", "library"),
        Column("mode", "mode"),
        *TIMES,
        Column("B/element, floor", "floor_bytes_per_element", "g"),
        Column("GB/s", "gb_per_s", ".2f"),
        Column("of copy", "share_of_copy", ".0%"),
        Column("codes", lambda row: {None: "", True: "same", False: "others"}[row["same_codes"]]),
    ]
    return finish(options, result, columns, f"dtype {result['dtype']}; GB/s are of the floor's bytes")
