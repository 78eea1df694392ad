"""Shows on stderr what a command is doing and for how many seconds; on a terminal the line disappears afterwards."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SetActivity = Callable[[str], None]
"""Changes the activity that is shown."""

REDRAW_INTERVAL_S = 0.2
LINE_INTERVAL_S = 10.0
"""Seconds between two lines in a file or a pipe."""


@contextmanager
def show_progress(activity: str) -> Iterator[SetActivity]:
    """Show `activity` on stderr while the block runs; the block may change it.

    A thread writes, because a single call may take long. A terminal's line has no escape codes. A file or a pipe gets a
    line every LINE_INTERVAL_S seconds, so a short command writes none.
    """
    if sys.stderr is None:
        yield lambda activity: None
        return
    activities, start, is_done = [activity], time.monotonic(), threading.Event()
    width = shutil.get_terminal_size().columns - 1

    def format_line() -> str:
        return f"... {activities[-1]}, {time.monotonic() - start:.0f} s"

    def redraw_line() -> None:
        shown = ""
        while not is_done.wait(REDRAW_INTERVAL_S):
            if format_line() != shown:
                shown = format_line()
                print(f"\r{shown[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        if shown:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)

    def print_lines() -> None:
        while not is_done.wait(LINE_INTERVAL_S):
            print(format_line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=redraw_line if sys.stderr.isatty() else print_lines, daemon=True)
    thread.start()
    try:
        yield activities.append
    finally:
        is_done.set()
        thread.join()
