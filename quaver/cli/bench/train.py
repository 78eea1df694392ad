"""`quaver bench train [CONFIG.toml] [options] [--section.field value ...]`."""

from pathlib import Path

from quaver.bench.train import Train
from quaver.cli.bench import finish
from quaver.cli.errors import EXIT_NONFINITE, bad_input, print_error
from quaver.trainer.config.flags import split_options
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.errors import NonFiniteError

DEFAULT_CONFIG = Path("train_configs/llama3_debug.toml")


def run(argv: list[str]) -> int:
    """Train as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 3 for a non-finite loss."""
    with bad_input():
        options, words = split_options(Train, argv, prog="quaver bench train [CONFIG.toml]")
        path, flags = parse_arguments(words)
        if options.device != "auto":
            flags.setdefault("training", {})["device"] = options.device
        config = load_config(path or DEFAULT_CONFIG, flags)
        options.prepare()
        subject = options.set_up(config)
    try:
        result = options.measure_steps(subject)
    except NonFiniteError as error:
        print_error(error)
        return EXIT_NONFINITE
    return finish(options, result)
