"""Verbs that take the flags of a run, `[CONFIG.toml] [--section.field value ...]`, among their own options."""

from typing import TypeVar

from quaver.trainer.config.flags import exit_after_help, split_flags
from quaver.trainer.config.settings import Settings

_Options = TypeVar("_Options", bound=Settings)


def split_options(kind: type[_Options], argv: list[str], *, prog: str) -> tuple[_Options, list[str]]:
    """Return the options of a verb and the words of the run; for --help print the verb's help and exit.

    Raises:
        ValueError: an option has no value, or a wrong one.
    """
    exit_after_help(kind, argv, prog=prog)
    values, words = split_flags(kind, argv)
    return kind(**values), words
