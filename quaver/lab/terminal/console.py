"""Console output: lines of text, tables that fit 80 columns, and JSON; and a standard output that may fail."""

import json
import os
import sys
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from quaver.lab.terminal.escape import escape_controls, print_to_stderr
from quaver.lab.terminal.tables import fit_table


class FailSafeStdout:
    """Standard output until it fails; then nothing is shown, and the run continues.

    It fails when the reader of a pipe has ended, the terminal was closed, or the disk under a log file is full.
    """

    def __init__(self) -> None:
        self._file = sys.stdout  # a live display replaces sys.stdout

    def write(self, text: str) -> int:
        """Write `text` to stdout."""
        with self._silent_after_failure():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush stdout."""
        with self._silent_after_failure():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @contextmanager
    def _silent_after_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError, ValueError):  # no file descriptor
                # The buffer still has the text, and the interpreter flushes it when it exits.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._file.fileno())
                os.close(null)
            print_to_stderr(f"cannot write to stdout: {error.strerror}; the run continues without display")


def choose_color_system() -> typing.Literal["auto"] | None:
    """Return the color system for a console: the terminal's, or None under NO_COLOR. Rich keeps bold and dim text."""
    return None if os.environ.get("NO_COLOR") else "auto"


def make_stdout_console(*, quiet: bool = False) -> Console:
    """Return a console on standard output that outlives it."""
    return Console(file=typing.cast(IO[str], FailSafeStdout()), quiet=quiet, color_system=choose_color_system())


def print_line(text: str, console: Console | None = None) -> None:
    """Print one line, without wrapping or styles, on `console`; by default on stdout, until it fails."""
    console = console or make_stdout_console()
    console.print(escape_controls(text), soft_wrap=True, highlight=False, markup=False)


class _Console(Console):
    """A console that lets `quaver` end with the exit code of a closed pipe; Rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that Rich handles where it calls this


def print_views(views: Iterable[str | Table]) -> None:
    """Print lines unwrapped, and tables in the width of the terminal or 80 columns, whichever is more.

    A table whose numbers need more is wider: no number is cut.
    """
    width = max(80, Console().width)
    console = _Console(width=width, color_system=choose_color_system(), highlight=False, markup=False, emoji=False)
    for view in views:
        if isinstance(view, Table):
            console.width = fit_table(view, width)
            console.print(view)
        else:
            console.print(escape_controls(view), soft_wrap=True)


def print_views_or_json(views: Iterable[str | Table], content: dict[str, Any], *, as_json: bool) -> None:
    """Print the views, or the content as JSON."""
    if as_json:
        print(json.dumps(content, indent=2, allow_nan=False))
    else:
        print_views(views)
