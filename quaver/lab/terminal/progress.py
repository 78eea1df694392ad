"""Shows on stderr what a command is doing and for how many seconds; on a terminal the line disappears afterwards."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]
"""Called with the description of the next activity."""

EVERY_S = 0.2
EVERY_LINE_S = 10.0
"""Seconds between two lines in a file or a pipe."""


@contextmanager
def show_progress(activity: str) -> Iterator[Tell]:
    """Show `activity` on stderr while the block runs; the block may change it.

    A thread writes, because a single call may take long. A terminal's line has no escape codes. A file or a pipe gets a
    line every EVERY_LINE_S seconds, so a short command writes none.
    """
    if sys.stderr is None:
        yield lambda text: None
        return
    told, start, is_done = [activity], time.monotonic(), threading.Event()
    width = shutil.get_terminal_size().columns - 1

    def line() -> str:
        return f"... {told[-1]}, {time.monotonic() - start:.0f} s"

    def show() -> None:
        shown = ""
        while not is_done.wait(EVERY_S):
            if line() != shown:
                shown = line()
                print(f"\r{shown[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        if shown:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)

    def log() -> None:
        while not is_done.wait(EVERY_LINE_S):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=show if sys.stderr.isatty() else log, daemon=True)
    thread.start()
    try:
        yield told.append
    finally:
        is_done.set()
        thread.join()
