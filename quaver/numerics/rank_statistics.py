"""Merges the tallies of all ranks on the first rank, in one collective, and finds ranks whose weights differ.

Ranks that multiply by a whole weight must have the same weight: replicas of DDP and HSDP, and what FSDP gathers. Their
tallies for its casts show whether they do: by counts and sums per scale, and by the extremes of elements and of scales.
Tallies do not see a permutation of elements, nor a change of less than `SUM_TOLERANCE` of the sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from quaver.numerics.record import Float64Array
from quaver.numerics.statistics import merge_tallies, normalize_tally
from quaver.runtime.agreement import find_collective_device
from quaver.runtime.process_group import has_process_group

SUM_TOLERANCE = 1e-9
"""The relative tolerance between sums: ranks may have run different numbers of microbatches."""


class GatheredStatistics(NamedTuple):
    """The statistics of all ranks, on the first rank's CPU."""

    tallies: Tensor
    """[rows, TALLY_WIDTH], merged."""
    extras: Tensor | None
    """[rows, EXTRAS_WIDTH], summed over the ranks."""
    by_rank: list[Tensor]
    """The tallies of each rank, [rows, TALLY_WIDTH], before the merge."""


def gather_tallies(
    tallies: Tensor, extras: Tensor | None, group: dist.ProcessGroup | None
) -> GatheredStatistics | None:
    """Gather tallies [rows, TALLY_WIDTH] and extras [rows, EXTRAS_WIDTH] of all ranks. None except on the first.

    The first rank briefly holds the tallies of every rank: 2.2 KB per row and rank, 6.4 KB with extras.
    """
    local = tallies if extras is None else torch.cat([tallies, extras], 1)
    by_rank = [local]
    if has_process_group() and dist.get_world_size(group) > 1:
        local = local.to(find_collective_device(group))
        is_first = dist.get_rank(group) == 0
        by_rank = [torch.empty_like(local) for _ in range(dist.get_world_size(group))] if is_first else []
        dist.gather(local, by_rank or None, group=group, group_dst=0)
    if not by_rank:
        return None
    by_rank, width = [local.cpu() for local in by_rank], tallies.shape[1]
    merged = by_rank[0].clone()
    for local in by_rank[1:]:
        merge_tallies(merged[:, :width], local[:, :width])
        merged[:, width:] += local[:, width:]
    merged_extras = None if extras is None else merged[:, width:]
    return GatheredStatistics(merged[:, :width], merged_extras, [local[:, :width] for local in by_rank])


def find_disagreements(by_rank: Sequence[Tensor], rows: Iterable[int]) -> dict[int, int]:
    """Return the rows whose tallies differ between ranks, each with the first rank that differs from the majority.

    On a tie, the side with the lowest rank wins. A rank without observations agrees.
    """
    outliers = {}
    for row in rows if len(by_rank) > 1 else ():
        normalized = ((rank, normalize_tally(tallies[row])) for rank, tallies in enumerate(by_rank))
        outlier = _find_outlier({rank: values for rank, values in normalized if values is not None})
        if outlier is not None:
            outliers[row] = outlier
    return outliers


def _find_outlier(tallies: dict[int, Float64Array]) -> int | None:
    if len(tallies) < 2:
        return None
    ranks, values = list(tallies), np.stack(list(tallies.values()))
    if _are_close(values, values[0]).all():
        return None
    majority = values[np.argmax([_are_close(values, row).sum() for row in values])]
    return ranks[int(np.argmin(_are_close(values, majority)))]


def _are_close(values: Float64Array, row: Float64Array) -> NDArray[np.bool_]:
    return np.asarray(np.isclose(values, row, rtol=SUM_TOLERANCE, atol=0, equal_nan=True).all(1))
