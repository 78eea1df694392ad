"""Turns bad input into one line on stderr and exit code 2, and a result that cannot be written into exit code 4."""

from collections.abc import Iterator
from contextlib import contextmanager

from quaver.lab.runs.errors import CheckpointError
from quaver.lab.terminal.escape import print_to_stderr
from quaver.runtime.devices import MissingDeviceError
from quaver.runtime.errors import InputError, NotWrittenError, describe_error, has_no_room

EXIT_BAD_INPUT = 2
EXIT_NONFINITE = 3
EXIT_NOT_WRITTEN = 4
EXIT_ALARM = 5
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

BAD_INPUT_ERRORS = (InputError, NotImplementedError, OSError, MissingDeviceError)
"""Exceptions for bad input. A ValueError that is no InputError is a bug."""


def print_error(message: object) -> None:
    """Print `message`, a text or an exception, as one line on stderr."""
    line = " ".join(describe_error(message).split())
    print_to_stderr(f"error: {line}")


@contextmanager
def report_bad_input() -> Iterator[None]:
    """Turn bad input in the block into one line on stderr and SystemExit(2), a NotWrittenError into SystemExit(4)."""
    try:
        yield
    except (*BAD_INPUT_ERRORS, CheckpointError) as error:
        if isinstance(error, BrokenPipeError) or has_no_room(error):  # of stdout, which `main` reports
            raise
        print_error(error)
        raise SystemExit(choose_exit_code(error)) from error


def choose_exit_code(error: BaseException) -> int:
    """Return 4 if `error` says that a result cannot be written, for want of space for example, and 2 otherwise."""
    is_write_error = isinstance(error, NotWrittenError) or has_no_room(error)
    if isinstance(error, CheckpointError):
        is_write_error = error.is_write_error
    return EXIT_NOT_WRITTEN if is_write_error else EXIT_BAD_INPUT
