"""`quaver bench linear [options]`."""

from quaver.bench.linear import MODES, bench_linear
from quaver.bench.shapes import MODELS, parse_shapes
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
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input


def run(argv: list[str]) -> int:
    """Time a linear as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    with bad_input():
        shapes = parse_shapes(options.shapes, tokens=options.tokens, divisor=options.divisor)
        recipes = check_recipes(options.recipes)
        with_torchao = check_torchao(options.torchao)
        surroundings = check_common(options)
    result = bench_linear(
        shapes,
        recipes,
        options.modes,
        device=surroundings.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=surroundings.report,
    )
    columns = [
        ("shape", field("shape")),
        ("mode", field("mode")),
        ("library", field("library")),
        ("recipe", field("recipe")),
        *TIMES,
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("torchao / this", number("torchao_time_over_this", ".2f", unknown="")),
    ]
    return finish(surroundings, result, columns, f"dtype {result['dtype']}")


def _parser() -> Parser:
    parser = bench_parser(
        "linear", "Forward and backward of one linear, per recipe, against bfloat16 nn.Linear and torchao."
    )
    parser.add_argument(
        "--shapes",
        default="1024,16",
        help=f"sizes (1024), M x K x N (512x1024x4096) or models ({', '.join(MODELS)}), with commas between",
    )
    parser.add_argument("--tokens", type=positive, default=2048, help="M of a model's linears")
    parser.add_argument("--divisor", type=positive, default=1, help="divide K and N of a model's linears by this")
    add_recipes(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    add_torchao(parser)
    return parser
