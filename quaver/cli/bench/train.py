"""`quaver bench train [CONFIG.toml] [options] [--section.field value ...]`."""

from pathlib import Path
from typing import Any

from quaver.bench.train import LEAST_WARMUP, bench_train, prepare
from quaver.cli.bench.options import Parser, add_recipes, bench_parser, check_common, check_recipes, natural
from quaver.cli.bench.tables import TIMES, field, finish, mebibytes, number
from quaver.cli.errors import bad_input, print_error
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.errors import NonFiniteError

DEFAULT_CONFIG = Path("train_configs/llama3_debug.toml")

EXIT_NONFINITE = 3


def run(argv: list[str]) -> int:
    """Train as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 3 for a non-finite loss."""
    options, words = _parser().parse_known_args(argv)
    with bad_input():
        path, flags = parse_arguments(words)
        if options.device != "auto":
            flags.setdefault("training", {})["device"] = options.device
        config = load_config(path or DEFAULT_CONFIG, flags)
        recipes = check_recipes(options.recipes)
        if options.warmup < LEAST_WARMUP:
            raise ValueError(
                f"--warmup: expected {LEAST_WARMUP} or more, got {options.warmup}: memory is measured in it"
            )
        surroundings = check_common(options)
        subject = prepare(config, recipes, steps=options.warmup + options.rounds)
    try:
        result = bench_train(subject, rounds=options.rounds, warmup=options.warmup, report=surroundings.report)
    except NonFiniteError as error:
        print_error(error)
        return EXIT_NONFINITE
    columns = [
        ("precision", field("precision")),
        *TIMES,
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("/ high precision", number("time_over_high_precision", ".2f")),
        ("peak", mebibytes("peak_bytes")),
        ("peak / high precision", number("peak_over_high_precision", ".2f")),
    ]
    return finish(surroundings, result, columns, _note(result))


def _note(result: dict[str, Any]) -> str:
    sources = dict.fromkeys(row["peak_source"] for row in result["rows"])
    return f"{result['parameters']:,} parameters, {result['step_tokens']:,} tokens a step; MiB: {'; '.join(sources)}"


def _parser() -> Parser:
    parser = bench_parser(
        "train",
        f"Steps of quaver train in high precision and in each recipe. Takes a config (default: {DEFAULT_CONFIG}) and "
        "the flags of quaver train beside these options.",
    )
    parser.allow_abbrev = False
    parser.add_argument("--warmup", type=natural, default=3, help="steps before the timed ones (--rounds)")
    add_recipes(parser)
    return parser
