"""The config of a run, from the file and the flags of a command."""

import sys
from pathlib import Path

from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import Sections, list_turned_off, load_config


def load_run(path: Path | None, flags: Sections, *, is_quiet: bool = False) -> TrainConfig:
    """Return `load_config(path, flags)`. One line on stderr lists the settings that a flag turns off with float8.

    Args:
        is_quiet: print nothing, as ranks after the first do.
    """
    config = load_config(path, flags)
    turned_off = list_turned_off(path, flags)
    if turned_off and not is_quiet:
        line = f"quaver: float8.enable_float8_linear = false also turns off, of {path}: {', '.join(turned_off)}"
        print(line, file=sys.stderr, flush=True)
    return config
