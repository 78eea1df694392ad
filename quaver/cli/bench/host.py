"""`quaver bench host [options]`."""

from quaver.bench.host import bench_host
from quaver.bench.linear import MODES
from quaver.bench.shapes import Shape
from quaver.cli.bench.options import (
    DTYPES,
    Parser,
    add_recipes,
    add_torchao,
    bench_parser,
    check_common,
    check_recipes,
    check_torchao,
    positive,
)
from quaver.cli.bench.tables import TIMES, field, finish, number, precision
from quaver.cli.errors import bad_input


def run(argv: list[str]) -> int:
    """Measure a tiny linear as `argv` says, save and print it; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    with bad_input():
        recipes = check_recipes(options.recipes)
        with_torchao = check_torchao(options.torchao)
        surroundings = check_common(options)
    result = bench_host(
        Shape("", options.size, options.size, options.size),
        recipes,
        options.modes,
        device=surroundings.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=surroundings.report,
    )
    no_kernels = "none: a CPU" if surroundings.device.type == "cpu" else "not seen"
    columns = [
        ("mode", field("mode")),
        ("precision", precision),
        *TIMES,
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("operations", number("operations", "d", unknown="not counted")),
        ("kernels", number("kernels", "d", unknown=no_kernels)),
    ]
    return finish(
        surroundings, result, columns, f"{options.size} x {options.size} x {options.size}, dtype {result['dtype']}"
    )


def _parser() -> Parser:
    parser = bench_parser("host", "What the forward and backward of a tiny linear cost the host.")
    parser.add_argument("--size", type=positive, default=16, help="M, K and N of the linear")
    add_recipes(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    add_torchao(parser)
    return parser
