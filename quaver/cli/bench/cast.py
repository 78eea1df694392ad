"""`quaver bench cast [options]`."""

from dataclasses import dataclass
from typing import Annotated, Any

from quaver.bench.cast import KINDS, bench_cast
from quaver.bench.shapes import parse_matrices
from quaver.cli.bench.options import DTYPES, BenchOptions, Dtype, Torchao, parse_bench, surroundings
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1, OneOf


@dataclass(frozen=True)
class Cast(Torchao, BenchOptions):
    """Casts of one matrix to float8: quaver's, compiled PyTorch's, torchao's; and a copy."""

    shapes: str = "1024,2048x4096"
    """Sizes (1024), rows x columns (512x4096) or models (llama-8b, llama-70b), with commas between."""
    tokens: AtLeast1 = 2048
    """Rows of a model's inputs."""
    divisor: AtLeast1 = 1
    """Divide the columns of a model's inputs by this."""
    casts: tuple[Annotated[str, OneOf(tuple(KINDS))], ...] = tuple(KINDS)
    """Kinds of casts."""
    dtype: Dtype = "bfloat16"
    """Dtype of the matrix."""


def run(argv: list[str]) -> int:
    """Time casts as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Cast, argv, "cast")
        matrices = parse_matrices(options.shapes, tokens=options.tokens, divisor=options.divisor)
        with_torchao = options.with_torchao
        around = surroundings(options)
    result = bench_cast(
        matrices,
        options.casts,
        device=around.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=around.report,
    )
    columns = [
        ("matrix", field("matrix")),
        ("cast", field("cast")),
        ("library", field("library")),
        ("mode", field("mode")),
        *TIMES,
        ("B/element, floor", number("floor_bytes_per_element", "g")),
        ("GB/s", number("gb_per_s", ".2f")),
        ("of copy", number("share_of_copy", ".0%")),
        ("codes", _codes),
    ]
    return finish(around, result, columns, f"dtype {result['dtype']}; GB/s are of the floor's bytes")


def _codes(row: dict[str, Any]) -> str:
    return "" if row["same_codes"] is None else "same" if row["same_codes"] else "others"
