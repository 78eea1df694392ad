"""Tells where a step is stuck: the stack of every thread, of every rank that waits too long.

The stacks are written by a thread of the interpreter's own fault handler, which needs no lock of Python: it also
reports a process that is stuck inside a kernel, a collective or a lock. Each rank watches itself; ranks that wait for
one that is stuck are late as well, and all of them leave their stacks.
"""

import faulthandler
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


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
        line = f"quaver: {what} takes longer than {seconds:g} s; its stacks are in {self.path}"
        late = threading.Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
        late.daemon = True
        faulthandler.dump_traceback_later(seconds, repeat=True, file=self.file)
        late.start()
        try:
            yield
        finally:
            late.cancel()
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def watchdog(path: Path) -> Iterator[Watchdog]:
    """Have a watchdog that writes to `path`; without stacks there is no file in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)  # ranks of another machine may have a disk of their own
    with path.open("a", encoding="utf-8") as file:
        yield Watchdog(path, file)
    if path.stat().st_size == 0:
        path.unlink()
