"""Moments of parameters whose blocks several ranks share, as those of a row-parallel linear: one scale for each block.

    1. each rank     the amaxes that the moments of its part would have
    2. the ranks     the largest over those that share the blocks: one all-reduce of 4 bytes a block and moment
    3. each rank     encodes its part by them, and has the new scales of whole rows

So states are the same to the bit as on one rank. A rank without columns takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.optim.blocks import BlockGrid, cut_axes, grid_of
from quaver.optim.rounding import scales_of
from quaver.runtime.collectives import max_over_ranks
from quaver.torch_private.dtensor import is_dtensor


class CutPart(NamedTuple):
    """The amaxes of the blocks of a parameter, after `agree` those of the whole blocks."""

    parameter: Tensor
    grid: BlockGrid
    amaxes: Tensor
    """float32 [moments, rows, blocks of a whole row]; 0 where this rank has nothing."""

    @classmethod
    def of(cls, parameter: Tensor, moments: int) -> CutPart:
        """With zeros."""
        grid = grid_of(parameter)
        device = parameter.device if not is_dtensor(parameter) else parameter.to_local().device
        zeros = torch.zeros(moments, grid.rows, grid.row_blocks, dtype=torch.float32, device=device)
        return cls(parameter, grid, zeros)

    @property
    def own(self) -> Tensor:
        """The amaxes of the blocks of which this rank has elements, a view [moments, rows, blocks]."""
        return self.amaxes.narrow(2, self.grid.first_of_row if self.grid.blocks else 0, self.grid.blocks)


def agree(parts: Sequence[CutPart]) -> list[CutPart]:
    """The largest amaxes over the ranks that share blocks, NaN where one rank has one. A collective.

    Args:
        parts: in the same order on all ranks.
    """
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        alike[tuple(tuple(dist.get_process_group_ranks(group)) for group in _groups(part.parameter))].append(index)
    agreed = list(parts)
    for indices in alike.values():
        amaxes = torch.cat([parts[i].amaxes.flatten() for i in indices])
        for group in _groups(parts[indices[0]].parameter):
            amaxes = max_over_ranks(amaxes, group)
        of_parts = amaxes.split([parts[i].amaxes.numel() for i in indices])
        for i, each in zip(indices, of_parts, strict=True):
            agreed[i] = parts[i]._replace(amaxes=each.view(parts[i].amaxes.shape))
    return agreed


def _groups(parameter: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    return [parameter.device_mesh.get_group(axis) for axis in cut_axes(parameter)]


def store_scales(part: CutPart, scales: Sequence[Tensor | None], is_fine: Tensor) -> None:
    """Write the scales of whole rows, one tensor for each of `part.amaxes` or None, where a block `is_fine`."""
    for scale, amax in zip(scales, part.amaxes, strict=True):
        if scale is not None:
            made = scales_of(amax)[1].view_as(scale)
            scale.copy_(torch.where(is_fine.view_as(scale) if is_fine.dim() else is_fine, made, scale))
