"""Tells of storages that Python code empties and refills, as FSDP2 does with gathered parameters.

`UntypedStorage.resize_` is no operator, so no dispatch mode sees it, and torch has no other word for it. While anyone
listens it is therefore replaced by a function that calls it and then tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import UntypedStorage

Listener = Callable[[UntypedStorage, int], None]
"""Called with the storage after its resize, and its bytes before."""

_listeners: list[Listener] = []
_resize: Callable[[UntypedStorage, int], UntypedStorage] = UntypedStorage.resize_


@contextmanager
def listen_to_resizes(listener: Listener) -> Iterator[None]:
    """Have `listener` told of every resize of a storage inside the block."""
    if not _listeners:
        UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            del UntypedStorage.resize_  # the inherited method again


def _resize_and_tell(storage: UntypedStorage, size: int) -> UntypedStorage:
    before_bytes = storage.nbytes()
    _resize(storage, size)
    for listener in tuple(_listeners):
        listener(storage, before_bytes)
    return storage
