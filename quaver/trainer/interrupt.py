"""Lets Ctrl-C end a run between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """`requested` turns true at the first Ctrl-C."""

    requested: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into `requested`; the second raises KeyboardInterrupt as usual.

    Signals belong to the main thread; in another one nothing changes.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = signal.getsignal(signal.SIGINT)

    def request(_signal: int, _frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
