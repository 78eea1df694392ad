"""Scales of moments whose blocks several ranks share, as in a row-parallel linear.

    1. each rank     computes the amaxes of the new moments of its shard
    2. all ranks     take the maximum over the ranks that share a block: an all-reduce of 4 bytes per block and moment
    3. each rank     quantizes its shard with these amaxes, and stores the new scales of whole rows

States are therefore bit-identical to those on one rank. A rank without columns joins the collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.optim.blocks import BlockGrid, find_cut_axes, make_grid
from quaver.optim.rounding import compute_moment_scales
from quaver.runtime.collectives import all_reduce_max
from quaver.torch_private.dtensor import is_dtensor


class BlockAmaxes(NamedTuple):
    """The amaxes of a parameter's blocks: over this rank's elements, or after `reduce_amaxes` over whole blocks."""

    parameter: Tensor
    grid: BlockGrid
    amaxes: Tensor
    """float32 [moments, rows, blocks of a whole row]; 0 for blocks without elements on this rank."""

    @classmethod
    def zeros(cls, parameter: Tensor, num_moments: int) -> BlockAmaxes:
        """Make amaxes of zero."""
        grid = make_grid(parameter)
        device = parameter.device if not is_dtensor(parameter) else parameter.to_local().device
        zeros = torch.zeros(num_moments, grid.rows, grid.blocks_per_whole_row, dtype=torch.float32, device=device)
        return cls(parameter, grid, zeros)

    @property
    def local(self) -> Tensor:
        """A view of the amaxes of the blocks that this rank has elements of, [moments, rows, blocks]."""
        return self.amaxes.narrow(
            2, self.grid.first_row_block if self.grid.blocks_per_row else 0, self.grid.blocks_per_row
        )


def reduce_amaxes(unreduced: Sequence[BlockAmaxes]) -> list[BlockAmaxes]:
    """Take the largest amaxes over the ranks that share blocks; NaN propagates. A collective.

    Args:
        unreduced: amaxes of parameters, in the same order on all ranks.
    """
    by_ranks: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for index, local in enumerate(unreduced):
        ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in _get_groups(local.parameter))
        by_ranks[ranks].append(index)
    reduced = list(unreduced)
    for indices in by_ranks.values():
        amaxes = torch.cat([unreduced[i].amaxes.flatten() for i in indices])
        for group in _get_groups(unreduced[indices[0]].parameter):
            amaxes = all_reduce_max(amaxes, group)
        split = amaxes.split([unreduced[i].amaxes.numel() for i in indices])
        for i, whole_amaxes in zip(indices, split, strict=True):
            reduced[i] = unreduced[i]._replace(amaxes=whole_amaxes.view(unreduced[i].amaxes.shape))
    return reduced


def _get_groups(parameter: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    return [parameter.device_mesh.get_group(axis) for axis in find_cut_axes(parameter)]


def store_scales(block_amaxes: BlockAmaxes, scales: Sequence[Tensor | None], is_finite: Tensor) -> None:
    """Write the scales of whole rows, a tensor or None for each of the `amaxes`, except where a block is skipped."""
    for scale, amax in zip(scales, block_amaxes.amaxes, strict=True):
        if scale is not None:
            new = compute_moment_scales(amax)[1].view_as(scale)
            scale.copy_(torch.where(is_finite.view_as(scale) if is_finite.dim() else is_finite, new, scale))
