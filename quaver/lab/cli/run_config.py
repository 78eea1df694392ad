"""The config of a run, from the file and the flags of a command."""

from pathlib import Path

from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import Sections, list_settings_turned_off, load_config
from quaver.lab.terminal.escape import print_to_stderr


def load_config_and_warn(path: Path | None, flags: Sections) -> TrainConfig:
    """Return `load_config(path, flags)`, and print the settings that a flag turned off with float8."""
    config = load_config(path, flags)
    print_settings_turned_off(path, flags)
    return config


def print_settings_turned_off(path: Path | None, flags: Sections) -> None:
    """Print one line on stderr that lists the settings that a flag turns off with float8, if there are any."""
    if turned_off := list_settings_turned_off(path, flags):
        print_to_stderr(f"float8.enable_float8_linear = false also turns off, of {path}: {', '.join(turned_off)}")
