"""An error on every rank, instead of a hang, where ranks disagree about what they will exchange.

Collectives match by their order. A rank with a layer less or another recipe would issue others, and hang or read
garbage. So before the first exchange for a set of layers the ranks compare digests of their descriptions, and exchange
the descriptions themselves only where those differ.
"""

from __future__ import annotations

import hashlib
import itertools
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
    for rank, theirs in enumerate(gathered):
        for of_first, line in itertools.zip_longest(gathered[0], theirs, fillvalue="nothing"):
            if of_first != line:
                raise RuntimeError(f"ranks disagree about {what}: rank 0 has {of_first!r}, rank {rank} has {line!r}")
    raise RuntimeError(f"ranks disagree about {what}")
