"""`quaver bench train [CONFIG.toml] [options] [--section.field value ...]`."""

from dataclasses import dataclass
from pathlib import Path

from quaver.bench.train import LEAST_WARMUP, bench_train, prepare
from quaver.cli.bench.options import BenchOptions, Recipes
from quaver.cli.bench.tables import TIMES, Column, finish, mebibytes
from quaver.cli.errors import EXIT_NONFINITE, bad_input, print_error
from quaver.trainer.config.flags import exit_after_help, split_flags
from quaver.trainer.config.settings import NotNegative
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.errors import NonFiniteError

DEFAULT_CONFIG = Path("train_configs/llama3_debug.toml")


@dataclass(frozen=True)
class Train(Recipes, BenchOptions):
    """Steps of quaver train in high precision and in each recipe. The flags of quaver train are accepted too; the
    default config is train_configs/llama3_debug.toml.
    """

    warmup: NotNegative = 3
    """Steps before the timed ones (--rounds)."""


def run(argv: list[str]) -> int:
    """Train as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 3 for a non-finite loss."""
    exit_after_help(Train, argv, prog="quaver bench train [CONFIG.toml]")
    with bad_input():
        values, words = split_flags(Train, argv)
        options = Train(**values)
        path, flags = parse_arguments(words)
        if options.device != "auto":
            flags.setdefault("training", {})["device"] = options.device
        config = load_config(path or DEFAULT_CONFIG, flags)
        if options.warmup < LEAST_WARMUP:
            raise ValueError(
                f"--warmup: expected {LEAST_WARMUP} or more, got {options.warmup}: memory is measured in it"
            )
        setup = options.setup()
        subject = prepare(config, options.recipe_names, steps=options.warmup + options.rounds)
    try:
        result = bench_train(setup, subject, warmup=options.warmup)
    except NonFiniteError as error:
        print_error(error)
        return EXIT_NONFINITE
    columns = [
        Column("precision", "precision"),
        *TIMES,
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("/ high precision", "time_over_high_precision", ".2f"),
        mebibytes("peak", "peak_bytes"),
        Column("peak / high precision", "peak_over_high_precision", ".2f"),
    ]
    sources = "; ".join(dict.fromkeys(row["peak_source"] for row in result["rows"]))
    note = f"{result['parameters']:,} parameters, {result['step_tokens']:,} tokens a step; MiB: {sources}"
    return finish(options, result, columns, note)
