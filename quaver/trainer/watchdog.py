"""Tells where a step is stuck: the stack of every thread, of every rank that waits too long.

Each rank watches itself; ranks that wait for one that is stuck are late as well, and all of them leave their stacks.

[Note: two ways to write stacks] A thread that holds the interpreter's lock can read the stacks of all others, for they
stand still. Where a step is stuck inside a kernel or a collective that does not let go of the lock, no such thread gets
to run; then a thread of the interpreter's fault handler writes the stacks without the lock. It must not do so while
Python code runs: it would read frames that are changing, which has ended processes (Python up to 3.13 at least).
So it is set off only when the thread with the lock has been waiting for it in vain.
"""

import faulthandler
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

WITHOUT_LOCK_S = 10.0
"""Seconds for which the interpreter's lock must have been held before stacks are written without it."""


@dataclass
class Watchdog:
    """Watches steps; `watchdog` is the way to get one."""

    path: Path
    file: TextIO

    @contextmanager
    def step(self, seconds: float, what: str) -> Iterator[None]:
        """Run the block; each `seconds` that it takes, add all stacks of this process to the file. 0 watches nothing.

        The first time, a line on stderr says so, and `what` is late. The step goes on: what ends it is a collective's
        timeout, or the user.
        """
        if not seconds:
            yield
            return
        is_over = threading.Event()
        self._write_without_lock(seconds)
        late = threading.Thread(target=self._watch, args=(seconds, what, is_over), name="watchdog", daemon=True)
        late.start()
        try:
            yield
        finally:
            is_over.set()
            late.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, seconds: float, what: str, is_over: threading.Event) -> None:
        """Write the stacks each `seconds` until the step is over (Note: two ways to write stacks)."""
        is_told = False
        while not is_over.wait(seconds):
            self._write_without_lock(seconds)
            faulthandler.dump_traceback(file=self.file, all_threads=True)
            if not is_told:
                line = f"quaver: {what} takes longer than {seconds:g} s; its stacks are in {self.path}"
                print(line, file=sys.stderr, flush=True)
                is_told = True

    def _write_without_lock(self, seconds: float) -> None:
        """Have the fault handler write stacks, again and again, unless this is called again in time."""
        faulthandler.dump_traceback_later(seconds + WITHOUT_LOCK_S, repeat=True, file=self.file)


@contextmanager
def watchdog(path: Path) -> Iterator[Watchdog]:
    """Have a watchdog that writes to `path`; without stacks there is no file in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)  # ranks of another machine may have a disk of their own
    with path.open("a", encoding="utf-8") as file:
        yield Watchdog(path, file)
    if path.stat().st_size == 0:
        path.unlink()
