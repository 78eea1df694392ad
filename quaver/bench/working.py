"""Says on a terminal what a command is doing, and for how many seconds, in a line that goes when it is done."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]
"""Called with what is being done from now on."""

_EVERY_S = 0.2


@contextmanager
def working(what: str) -> Iterator[Tell]:
    """Show `what` on stderr while the block runs, if that is a terminal; the block may tell of other things.

    A thread writes, because what takes long may be one call. The line has no escape codes.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    told, start, is_done = [what], time.monotonic(), threading.Event()
    width = shutil.get_terminal_size().columns - 1

    def show() -> None:
        shown = ""
        while not is_done.wait(_EVERY_S):
            line = f"... {told[-1]}, {time.monotonic() - start:.0f} s"
            if line != shown:
                shown = line
                print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        if shown:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield told.append
    finally:
        is_done.set()
        thread.join()
