"""The errors for bad input and for results that cannot be written, which the `quaver` command prints in one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class InputError(ValueError):
    """Text that the user wrote is wrong: a name, a path, a setting, or the content of a file. The message is one line.

    Code that reads such text raises it, also where a model does not support the named choice; it raises ValueError for
    an argument that only Python code passes. The `quaver` command prints InputErrors, and any other ValueError is a bug
    there and ends in a traceback. Configs raise ValueError: a command makes them in `reraise_as_input_error`.
    """


@contextmanager
def reraise_as_input_error(prefix: str = "") -> Iterator[None]:
    """Raise an InputError with `prefix` and the message for a ValueError of the block, which only checks input."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{prefix}{error}") from error


def check_is_module(module: object, *, argument: str) -> None:
    """Raise TypeError unless `module`, the value of `argument`, is an nn.Module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument}: expected an nn.Module, got {type(module).__name__}")


class NotWrittenError(OSError):
    """A result could not be written, for example because the disk is full."""


def has_no_room(error: BaseException) -> bool:
    """Return whether `error` is a write without room: a full disk, a quota, or the size limit of a file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_write_error(error: OSError, target: str, remedy: str) -> OSError:
    """Return an error that says that `target` cannot be written, why, and the `remedy`.

    It is a NotWrittenError if there is no room, and otherwise of the class of `error`.
    """
    error_type = NotWrittenError if has_no_room(error) else type(error)
    return error_type(f"cannot write {target}: {error.strerror or error}; {remedy}")


def describe_error(error: object) -> str:
    """Return the text of `error`, or the name of its class if it has none, as in `raise NotImplementedError`."""
    return str(error).strip() or type(error).__name__
