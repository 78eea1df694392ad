"""The error for bad input, which the `quaver` command shows without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """What the user gave is wrong: a setting, a name, or the content of a file. The message is one line for the user.

    The `quaver` command prints it. Any other ValueError is a bug there, and ends in a traceback.
    """


@contextmanager
def blame_input(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError of the block, which only checks input, into a InputError with `prefix` and its message."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{prefix}{error}") from error
