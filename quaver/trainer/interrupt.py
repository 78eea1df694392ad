"""Lets Ctrl-C, and the SIGTERM of a launcher or scheduler, end a run between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """`requested` turns true at the first signal."""

    requested: bool = False


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Turn the first SIGINT (Ctrl-C) or SIGTERM into `requested`; the second does what it always did.

    Signals belong to the main thread; in another one nothing changes.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def request(_signal: int, _frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in SIGNALS:
        signal.signal(number, request)
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
