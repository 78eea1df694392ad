"""`quaver bench cast [options]`."""

from typing import Any

from quaver.bench.cast import KINDS, bench_cast
from quaver.bench.shapes import MODELS, parse_matrices
from quaver.cli.bench.options import DTYPES, Parser, add_torchao, bench_parser, check_common, check_torchao, positive
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input


def run(argv: list[str]) -> int:
    """Time casts as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    with bad_input():
        matrices = parse_matrices(options.shapes, tokens=options.tokens, divisor=options.divisor)
        with_torchao = check_torchao(options.torchao)
        surroundings = check_common(options)
    result = bench_cast(
        matrices,
        options.casts,
        device=surroundings.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=surroundings.report,
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
    return finish(surroundings, result, columns, f"dtype {result['dtype']}; GB/s are of the floor's bytes")


def _codes(row: dict[str, Any]) -> str:
    return "" if row["same_codes"] is None else "same" if row["same_codes"] else "others"


def _parser() -> Parser:
    parser = bench_parser("cast", "Casts of one matrix to float8: quaver's, compiled PyTorch's, torchao's; and a copy.")
    parser.add_argument(
        "--shapes",
        default="1024,2048x4096",
        help=f"sizes (1024), rows x columns (512x4096) or models ({', '.join(MODELS)}), with commas between",
    )
    parser.add_argument("--tokens", type=positive, default=2048, help="rows of a model's inputs")
    parser.add_argument("--divisor", type=positive, default=1, help="divide the columns of a model's inputs by this")
    parser.add_argument("--casts", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    add_torchao(parser)
    return parser
