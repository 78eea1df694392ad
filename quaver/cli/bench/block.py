"""`quaver bench block [options]`."""

from typing import Any

from quaver.bench.block import MODES, bench_block, check_fits
from quaver.bench.modules import model_of
from quaver.cli.bench.options import (
    Parser,
    add_model,
    add_recipes,
    bench_parser,
    check_batch,
    check_common,
    check_recipes,
)
from quaver.cli.bench.tables import TIMES, field, finish, mebibytes, number, precision
from quaver.cli.errors import bad_input


def run(argv: list[str]) -> int:
    """Train a block as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    with bad_input():
        model = model_of(options.model, divisor=options.divisor)
        batch = check_batch(options)
        recipes = check_recipes(options.recipes)
        surroundings = check_common(options)
        check_fits(model, 1 + len(recipes), surroundings.device)
    name = f"{options.model}/{options.divisor}" if options.divisor > 1 else options.model
    result = bench_block(
        name,
        model,
        batch,
        recipes,
        options.modes,
        device=surroundings.device,
        rounds=options.rounds,
        report=surroundings.report,
    )
    columns = [
        ("mode", field("mode")),
        ("precision", precision),
        *TIMES,
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("resident", mebibytes("resident_bytes")),
        ("peak", mebibytes("peak_bytes")),
        ("tensors", mebibytes("tensor_peak_bytes")),
        ("kept", mebibytes("kept_bytes")),
        ("peak / bfloat16", number("peak_over_bfloat16", ".2f")),
    ]
    return finish(surroundings, result, columns, _note(result))


def _note(result: dict[str, Any]) -> str:
    model, batch = result["model"], result["batch"]
    return (
        f"block of {model['name']}: width {model['dim']}, {model['n_heads']} heads ({model['n_kv_heads']} for keys and "
        f"values), feed-forward {model['hidden_dim']}; {batch['sequences']} x {batch['seq_len']} tokens; memory in MiB"
    )


def _parser() -> Parser:
    parser = bench_parser("block", "Forward, backward and AdamW of one transformer block, per recipe.", rounds=10)
    add_model(parser)
    add_recipes(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    return parser
