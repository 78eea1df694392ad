"""Lets SIGUSR1 ask a running process where its memory goes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class MemoryRequest:
    """`count` is how many times it was asked."""

    count: int = 0


@contextmanager
def memory_request() -> Iterator[MemoryRequest]:
    """Count SIGUSR1 inside the block, which else would end the process.

    Signals belong to the main thread, and this one to POSIX: elsewhere nothing can ask.
    """
    request = MemoryRequest()
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(_signal: int, _frame: FrameType | None) -> None:
        request.count += 1

    previous = signal.signal(signal.SIGUSR1, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGUSR1, previous)
