"""Where the blocks of a parameter lie, in coordinates of the whole parameter, whatever part of it this rank holds.

A parameter [D0, ..., Dn] is a matrix of rows. A row is the shortest run of trailing dims with 256 elements or more,
but never the first dim of several: a linear's rows are [in_features], those of experts [E, N, K] are [K], those of a
convolution [out, in, 3, 3] are [in, 3, 3]. Blocks have 256 elements of one row; the last of a row may be shorter. So a
shard of whole rows (FSDP2, a column-parallel linear, experts over ranks) has whole blocks, and its scales are a shard
of the scales of the parameter. So has a shard of columns, if it is cut between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.kernels.adamw import BLOCK
from quaver.torch_private.dtensor import local_shape_and_offset


class BlockGrid(NamedTuple):
    """The part of a parameter that this rank holds, [rows, columns] as a matrix, and its blocks.

    Row r begins at element `lane` of block number `first + r // inner * outer + r % inner * row_blocks` of the whole
    parameter.
    """

    rows: int
    columns: int
    lane: int
    first: int
    inner: int
    outer: int
    row_blocks: int

    @property
    def blocks(self) -> int:
        """Blocks in a row of this part."""
        return blocks_in(self.lane + self.columns)


def blocks_in(columns: int) -> int:
    """How many blocks have so many elements."""
    return -(-columns // BLOCK)


def leading_dims(shape: Sequence[int]) -> int:
    """How many dims count the rows of a parameter of this shape."""
    leading = len(shape) - 1
    while leading > 1 and prod(shape[leading:]) < BLOCK:
        leading -= 1
    return max(leading, 0)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a whole parameter: its leading dims, and the blocks of a row."""
    leading = leading_dims(shape)
    return (*shape[:leading], blocks_in(prod(shape[leading:])))


def _part_of(parameter: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's part, and where it begins."""
    if isinstance(parameter, DTensor):
        return local_shape_and_offset(parameter)
    return parameter.shape, (0,) * parameter.dim()


def grid_of(parameter: Tensor) -> BlockGrid:
    """The grid of a plain parameter, or of this rank's part of a DTensor."""
    shape, (local, offset) = tuple(parameter.shape), _part_of(parameter)
    leading = leading_dims(shape)
    row_blocks = blocks_in(prod(shape[leading:]))
    rest = prod(shape[2:leading]) * row_blocks  # blocks of one index of the first two dims
    first = offset[0] * row_blocks if leading == 1 else 0
    inner, outer = max(prod(local[:leading]), 1), 0
    if leading > 1:
        first = (offset[0] * shape[1] + offset[1]) * rest
        inner, outer = max(prod(local[1:leading]), 1), shape[1] * rest
    column = offset[leading] * prod(shape[leading + 1 :]) if shape else 0
    return BlockGrid(
        prod(local[:leading]),
        prod(local[leading:]),
        column % BLOCK,
        first + column // BLOCK,
        inner,
        outer,
        row_blocks,
    )


def obstacle_of(parameter: Tensor) -> str:
    """Why this rank's part has no scales of its own; "" if it has. All ranks say the same."""
    shape, (local, _) = tuple(parameter.shape), _part_of(parameter)
    grid, leading = grid_of(parameter), leading_dims(shape)
    if tuple(local[2:leading]) != shape[2:leading] or tuple(local[leading + 1 :]) != shape[leading + 1 :]:
        return "it is sharded in a dim that is neither one of the first two nor the first of its rows"
    row = prod(shape[leading:])
    if grid.columns != row and (grid.lane or (grid.columns % BLOCK and not _is_end(parameter, leading))):
        return f"a shard cuts its rows of {row} within a block of {BLOCK}"
    return ""


def _is_end(parameter: Tensor, dim: int) -> bool:
    """Whether this rank's part reaches to the end of `dim`."""
    local, offset = _part_of(parameter)
    return offset[dim] + local[dim] == parameter.shape[dim]


def to_blocks(matrix: Tensor, grid: BlockGrid) -> Tensor:
    """Rows [R, columns] as blocks [R * grid.blocks, 256], filled up with zeros."""
    right = grid.blocks * BLOCK - grid.lane - grid.columns
    if grid.lane or right:
        matrix = F.pad(matrix, (grid.lane, right))
    return matrix.reshape(-1, BLOCK)


def from_blocks(blocks: Tensor, grid: BlockGrid) -> Tensor:
    """The rows [R, columns] of `to_blocks`, as a view."""
    return blocks.view(-1, grid.blocks * BLOCK)[:, grid.lane : grid.lane + grid.columns]


class Run(NamedTuple):
    """Rows `begin` to `end` of a parameter's grid, and the key of its random bits."""

    grid: BlockGrid
    begin: int
    end: int
    key: int

    @property
    def blocks(self) -> int:
        return (self.end - self.begin) * self.grid.blocks


def block_numbers(runs: Sequence[Run], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block of these runs, int32 [B]: its parameter's key, and its number in the whole parameter.

    The number of operations does not depend on the number of runs.
    """
    starts = [0, *accumulate(run.blocks for run in runs)]
    rows = [
        (start, run.begin, run.grid.blocks, *run.grid[3:], run.key - (run.key >> 31 << 32))
        for run, start in zip(runs, starts, strict=False)
    ]
    table = torch.tensor(rows, device=device)
    ids = torch.arange(starts[-1], device=device)
    start, begin, blocks, first, inner, outer, row_blocks, key = table[
        torch.searchsorted(table[:, 0].contiguous(), ids, right=True) - 1
    ].unbind(1)
    row = begin + (ids - start) // blocks
    number = first + row // inner * outer + row % inner * row_blocks + (ids - start) % blocks
    return key.to(torch.int32), number.to(torch.int32)
