"""An error on every rank, instead of a hang.

Collectives match by their order. A rank with a layer less or another recipe would issue others, and hang or read
garbage. So before the first exchange for a set of layers the ranks compare digests of their descriptions, and exchange
the descriptions themselves only where those differ.

What one rank does alone, as writing a file, can fail there alone, with any exception, and the others wait for it in
the next collective. So they learn at once how it ended.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_DIGEST_WORDS = 2

_T = TypeVar("_T")


def check_ranks_agree(lines: Sequence[str], group: ProcessGroup, device: torch.device, *, what: str) -> None:
    """Raise on every rank of `group` unless all have the same `lines`.

    Args:
        lines: a description, one line for each thing that must be the same.
        device: where the group's collectives take tensors.
        what: what the lines describe, for the message.
    Raises:
        RuntimeError: naming the first line that differs, and two ranks that differ in it.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") >> 1 for i in range(_DIGEST_WORDS)]
    low_and_high = torch.tensor([[-word for word in words], words], dtype=torch.int32, device=device)
    dist.all_reduce(low_and_high, dist.ReduceOp.MAX, group)
    if (low_and_high[0] == -low_and_high[1]).all():
        return
    gathered: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(gathered, list(lines), group)
    for rank, theirs in enumerate(gathered):
        for of_first, line in itertools.zip_longest(gathered[0], theirs, fillvalue="nothing"):
            if of_first != line:
                raise RuntimeError(f"ranks disagree about {what}: rank 0 has {of_first!r}, rank {rank} has {line!r}")
    raise RuntimeError(f"ranks disagree about {what}")


def on_every_rank(action: Callable[[], _T], group: ProcessGroup | None = None) -> list[_T]:
    """Run `action` and return its results by rank; where it raises on any, raise on every rank.

    Every rank of `group`, by default of the world, calls this. Without a process group there is one rank.

    Args:
        action: its result can be pickled.
    Raises:
        Exception: that of the first rank that failed, the same on every rank; a RuntimeError with its text where it
            cannot be pickled.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [action()]
    result: _T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = error
    rank = dist.get_rank(group)
    ended: list[tuple[_T | None, Exception | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(ended, (result, failure if failure is None else _sendable(failure, rank)), group)
    first = next((each for each, (_, error) in enumerate(ended) if error is not None), None)
    if first is not None:
        raise failure if failure is not None and first == rank else ended[first][1]  # type: ignore[misc]
    return [each for each, _ in ended]  # type: ignore[misc]


def on_first_rank(action: Callable[[], object], group: ProcessGroup | None = None) -> None:
    """Run `action` on the first rank of `group`; where it raises, raise on every rank, as `on_every_rank` does."""

    def first() -> None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) == 0:
            action()

    on_every_rank(first, group)


def _sendable(error: Exception, rank: int) -> Exception:
    """`error`, or a RuntimeError with its text, with a note of where it was raised."""
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - of a class that strangers wrote
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(f"raised on rank {rank}")
    return sent
