"""The error for bad input, which the `quaver` command shows without a traceback, a check, and the text of errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class InputError(ValueError):
    """A setting, a name or the content of a file that the user gave is wrong. The message is one line for the user.

    The `quaver` command prints it. Any other ValueError is a bug there, and ends in a traceback.
    """


@contextmanager
def blame_input(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError of the block, which only checks input, into an InputError with `prefix` and its message."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{prefix}{error}") from error


def check_is_module(module: object, *, argument: str) -> None:
    """Raise TypeError unless `module`, the value of `argument`, is an nn.Module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument}: expected an nn.Module, got {type(module).__name__}")


def describe_error(error: object) -> str:
    """Return the text of `error`, or the name of its class if it has none, as in `raise NotImplementedError`."""
    return str(error).strip() or type(error).__name__
