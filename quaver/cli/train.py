"""`quaver train [CONFIG.toml] [--section.field value ...]`."""

from quaver.cli.errors import bad_input, print_error
from quaver.trainer.config_io import load_config, parse_arguments, print_help
from quaver.trainer.nonfinite import NonFiniteError
from quaver.trainer.train import prepare, train

EXIT_NONFINITE = 3
EXIT_INTERRUPTED = 130


def run(argv: list[str]) -> int:
    """Train as `argv` says; 0 when finished, 2 for bad input, 3 for a non-finite loss, 130 after Ctrl-C."""
    if "--help" in argv or "-h" in argv:
        print_help()
        return 0
    with bad_input():
        config_path, flags = parse_arguments(argv)
        prepared = prepare(load_config(config_path, flags))
    try:
        summary = train(prepared)
    except NonFiniteError as error:
        print_error(error)
        return EXIT_NONFINITE
    return EXIT_INTERRUPTED if summary["status"] == "interrupted" else 0
