"""`quaver bench gemm [options]`."""

from typing import Any

from quaver.bench.gemm import GRANULARITIES, bench_gemm
from quaver.bench.shapes import MODELS, parse_shapes
from quaver.cli.bench.options import Parser, bench_parser, check_common, positive
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input


def run(argv: list[str]) -> int:
    """Time matmuls as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    with bad_input():
        shapes = parse_shapes(options.shapes, tokens=options.tokens, divisor=options.divisor)
        surroundings = check_common(options)
    result = bench_gemm(
        shapes,
        options.scales,
        device=surroundings.device,
        rounds=options.rounds,
        report=surroundings.report,
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
    return finish(surroundings, result, columns, _note(result))


def _note(result: dict[str, Any]) -> str:
    if result["peak"] == "unknown":
        return "peak unknown: there is no data sheet for this device in quaver/devices.py"
    return f"peak: {result['peak']}"


def _parser() -> Parser:
    parser = bench_parser("gemm", "The three matmuls of a linear, without casts: float8 against bfloat16.")
    parser.add_argument(
        "--shapes",
        default="1024",
        help=f"linears: sizes (1024), M x K x N (512x1024x4096) or models ({', '.join(MODELS)}), with commas between",
    )
    parser.add_argument("--tokens", type=positive, default=2048, help="M of a model's linears")
    parser.add_argument("--divisor", type=positive, default=1, help="divide K and N of a model's linears by this")
    parser.add_argument("--scales", nargs="+", choices=GRANULARITIES, default=list(GRANULARITIES))
    return parser
