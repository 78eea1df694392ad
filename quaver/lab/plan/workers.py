"""Calls a function in worker processes, which have one thread each.

Workers are spawned: a fork of a process that has used torch inherits its locks without the threads that hold them.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_TO_END = 5


def in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[tuple[int, Result], None, None]:
    """Yield the index of each item and what `function` returns of it, as they come.

    The workers end with the iterator, also if it is closed or if what it yields to raises an error, as at Ctrl-C.

    Args:
        items: each is asked for when a worker is free; all workers start with the first one.
        function: of a module; it, the items and the results are pickled. It does not raise errors that are expected.
        processes: at most so many; 1 calls `function` in this process.
    Raises:
        RuntimeError: a worker died, or `function` raised an error.
    """
    if processes <= 1:
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    left = enumerate(items)
    first = next(left, None)
    if first is None:
        return
    workers: dict[Any, _Worker] = {}
    try:
        for _ in range(processes):
            worker = _Worker(function)
            workers[worker.connection] = worker
        for worker, item in zip(workers.values(), chain([first], left), strict=False):
            worker.take(*item)
        while connection := _ready(workers):
            worker = workers[connection]
            index, result = worker.index, worker.result()
            worker.take(*next(left, (-1, None)))
            yield index, result
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """A process, and the item that it has."""

    index = -1
    """The number of the item; -1 for none."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(function, theirs), daemon=True)
        with _interrupts_blocked():
            self.process.start()
        theirs.close()  # so that reading ends when the worker does

    def take(self, index: int, item: object) -> None:
        self.index = index
        if index >= 0:
            self.connection.send(item)

    def result(self) -> Any:
        try:
            result, error = self.connection.recv()
        except EOFError:
            self.process.join(_SECONDS_TO_END)
            code = self.process.exitcode
            raise RuntimeError(
                f"item {self.index} has no result: its worker process died with exit code {code}; -9 is mostly a lack "
                "of memory: use fewer processes"
            ) from None
        if error:
            raise RuntimeError(f"item {self.index} failed in a worker process: {error}")
        return result

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(_SECONDS_TO_END)
        if self.process.is_alive():
            self.process.kill()


def _ready(workers: dict[Any, _Worker]) -> Any:
    """The connection of a worker that has a result; None if no worker has an item."""
    busy = [connection for connection, worker in workers.items() if worker.index >= 0]
    return wait(busy)[0] if busy else None


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that starts inside the block never gets Ctrl-C, which a terminal sends to all of them.

    It inherits the mask of signals, so that it does not print a traceback while it imports; its parent ends it.
    """
    resource_tracker.ensure_running()  # else the start of a process starts it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    _use_no_semaphores()
    gc.freeze()  # else each full collection looks at all that was imported
    logging.disable(logging.WARNING)  # of torch's compiler, about code that is only predicted; errors are answers
    torch.set_num_threads(1)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str] = function(item), ""
        except Exception as error:  # noqa: BLE001 - raised where the results are read
            answer = None, f"{type(error).__name__}: {error}"
        connection.send(answer)


def _use_no_semaphores() -> None:
    """A worker that is ended gives no semaphore back, and Python would warn; tqdm, which torch calls, makes one."""
    with suppress(ImportError):
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
