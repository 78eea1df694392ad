"""Escapes control characters in untrusted text before a terminal shows it, and prints the lines of quaver on stderr."""

import sys
from contextlib import suppress


def escape_controls(text: str) -> str:
    """Return `text` with its unprintable characters escaped as Python does, except for line breaks."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def print_to_stderr(line: str) -> None:
    """Print `quaver: line` on stderr. Does nothing if stderr cannot be written: a closed pipe must not end a run."""
    with suppress(OSError):
        print(f"quaver: {escape_controls(line)}", file=sys.stderr, flush=True)
