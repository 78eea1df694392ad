"""An error on every rank where ranks disagree about what they will exchange, instead of a hang on some.

Collectives match by their order. A rank with a layer less or another recipe would issue others, and wait for ever or
read garbage. So before the first exchange of a set of layers, each rank sends the same few bytes: a digest of what it
has. Only where those differ are the descriptions themselves exchanged, to say what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_DIGEST_WORDS = 2


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
    raise RuntimeError(f"ranks disagree about {what}: {_first_difference(gathered)}")


def _first_difference(gathered: Sequence[Sequence[str]]) -> str:
    first = gathered[0]
    for rank, lines in enumerate(gathered):
        for here, there in zip(first, lines, strict=False):
            if here != there:
                return f"rank 0 has {here!r} where rank {rank} has {there!r}"
        if len(lines) != len(first):
            longer, shorter = (0, rank) if len(first) > len(lines) else (rank, 0)
            extra = gathered[longer][len(gathered[shorter])]
            return f"rank {longer} has {extra!r}, which rank {shorter} has not"
    return "their digests differ"
