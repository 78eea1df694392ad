"""Merges the slots of all ranks on the first one, in one collective, and finds ranks with other weights.

Ranks that multiply by a whole weight must have the same one: replicas of DDP and HSDP, and what FSDP gathers. Their
slots of its casts say whether they do: counts and sums per observation, extremes, scales. They differ where a weight
does, but for a permutation of elements and for changes below `CLOSE` of its sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from quaver.numerics.statistics import Values, compared_of, merge

CLOSE = 1e-9
"""How far sums may be apart, relatively: ranks may have run another number of micro-batches."""


class Gathered(NamedTuple):
    """The statistics of all ranks, on the first rank's CPU."""

    slots: Tensor
    """[rows, WIDTH], merged."""
    extras: Tensor | None
    """[rows, extras.WIDTH], added up."""
    by_rank: list[Tensor]
    """The slots of each rank."""


def gather(slots: Tensor, extras: Tensor | None, group: dist.ProcessGroup | None) -> Gathered | None:
    """Gather the slots [rows, WIDTH] and extras [rows, extras.WIDTH] of all ranks; None on ranks but the first.

    The first holds the slots of every rank for a moment: 2.2 KB for each row of each rank, 6.5 KB with extras.
    """
    own = slots if extras is None else torch.cat([slots, extras], 1)
    parts = [own]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        is_first = dist.get_rank(group) == 0
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))] if is_first else []
        dist.gather(own, parts or None, group=group, group_dst=0)
    if not parts:
        return None
    parts, width = [part.cpu() for part in parts], slots.shape[1]
    merged = parts[0].clone()
    for part in parts[1:]:
        merge(merged[:, :width], part[:, :width])
        merged[:, width:] += part[:, width:]
    return Gathered(merged[:, :width], None if extras is None else merged[:, width:], [p[:, :width] for p in parts])


def disagreeing(by_rank: Sequence[Tensor], rows: Iterable[int]) -> dict[int, int]:
    """For each of `rows` that ranks have seen differently, the first rank with another slot than most ranks.

    Of as many ranks on each side, those with the lowest one are right. A rank that has seen nothing agrees.
    """
    found = {}
    for row in rows if len(by_rank) > 1 else ():
        seen = {rank: values for rank, part in enumerate(by_rank) if (values := compared_of(part[row])) is not None}
        odd = _first_odd(seen)
        if odd is not None:
            found[row] = odd
    return found


def _first_odd(seen: dict[int, Values]) -> int | None:
    if len(seen) < 2:
        return None
    ranks, values = list(seen), np.stack(list(seen.values()))
    usual = values[0]
    if _are_close(values, usual).all():
        return None
    usual = values[np.argmax([_are_close(values, each).sum() for each in values])]
    return ranks[int(np.argmin(_are_close(values, usual)))]


def _are_close(values: Values, one: Values) -> NDArray[np.bool_]:
    """Which rows of `values` are the same as `one`."""
    return np.asarray(np.isclose(values, one, rtol=CLOSE, atol=0, equal_nan=True).all(1))
