"""Divides a parameter into blocks. Blocks are numbered in the whole parameter, also on a rank that holds a shard.

A parameter [D0, ..., Dn] is viewed as a matrix of rows. A row is the shortest run of trailing dims with 256 elements or
more, and does not include the first dim unless it is the only one. The rows of a linear are [in_features], the rows of
experts [E, N, K] are [K], the rows of a convolution [out, in, 3, 3] are [in, 3, 3]. A block has 256 elements of one
row; the last block of a row may be shorter.

A shard of whole rows (FSDP2, a column-parallel linear, experts over ranks) therefore has whole blocks, and its scales
are a shard of the parameter's scales. The same holds for a shard of columns that is cut between blocks. Ranks that
share blocks (a row-parallel linear) agree on their amaxes in each step (cut_blocks.py) and store scales of whole rows.
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

from quaver.kernels.adamw import MOMENT_BLOCK_ELEMENTS
from quaver.torch_private.dtensor import compute_local_shape_and_offset


class BlockGrid(NamedTuple):
    """This rank's shard of a parameter as a matrix [rows, columns], and its blocks.

    Row r begins at element `offset_in_block` of this block of the whole parameter:

        first_block + r // rows_per_outer * blocks_per_outer + r % rows_per_outer * blocks_per_whole_row
    """

    rows: int
    columns: int
    offset_in_block: int
    first_block: int
    rows_per_outer: int
    blocks_per_outer: int
    blocks_per_whole_row: int

    @property
    def blocks_per_row(self) -> int:
        """The number of blocks in a row of the shard."""
        return count_blocks(self.offset_in_block + self.columns) if self.columns else 0

    @property
    def first_row_block(self) -> int:
        """The index of the shard's first block in a row of the whole parameter."""
        return self.first_block % self.blocks_per_whole_row


def count_blocks(columns: int) -> int:
    """Return how many blocks `columns` elements of a row fill."""
    return -(-columns // MOMENT_BLOCK_ELEMENTS)


def count_leading_dims(shape: Sequence[int]) -> int:
    """Count the leading dims of a shape that enumerate rows."""
    leading = len(shape) - 1
    while leading > 1 and prod(shape[leading:]) < MOMENT_BLOCK_ELEMENTS:
        leading -= 1
    return max(leading, 0)


def get_scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a whole parameter's scales: its leading dims and the blocks of a row."""
    leading = count_leading_dims(shape)
    return (*shape[:leading], count_blocks(prod(shape[leading:])))


def make_grid(parameter: Tensor) -> BlockGrid:
    """Make the grid of a plain parameter, or of this rank's shard of a DTensor."""
    shape = local = tuple(parameter.shape)
    offset: Sequence[int] = (0,) * len(shape)
    if isinstance(parameter, DTensor):
        local, offset = compute_local_shape_and_offset(parameter)
    leading = count_leading_dims(shape)
    blocks_per_whole_row = count_blocks(prod(shape[leading:]))
    inner_blocks = prod(shape[2:leading]) * blocks_per_whole_row  # blocks of one index of the first two dims
    first_block = offset[0] * blocks_per_whole_row if leading == 1 else 0
    rows_per_outer, blocks_per_outer = max(prod(local[:leading]), 1), 0
    if leading > 1:
        first_block = (offset[0] * shape[1] + offset[1]) * inner_blocks
        rows_per_outer, blocks_per_outer = max(prod(local[1:leading]), 1), shape[1] * inner_blocks
    column = offset[leading] * prod(shape[leading + 1 :]) if shape else 0
    return BlockGrid(
        prod(local[:leading]),
        prod(local[leading:]),
        column % MOMENT_BLOCK_ELEMENTS,
        first_block + column // MOMENT_BLOCK_ELEMENTS,
        rows_per_outer,
        blocks_per_outer,
        blocks_per_whole_row,
    )


def _list_sharded_dims(parameter: Tensor) -> list[tuple[int, int]]:
    """List (axis, dim) for each mesh axis of several ranks that shards a dim. The same on all ranks."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    dims = [(axis, getattr(placement, "dim", None)) for axis, placement in enumerate(parameter.placements)]
    return [(axis, dim) for axis, dim in dims if dim is not None and mesh.size(axis) > 1]


def explain_block_obstacle(parameter: Tensor) -> str:
    """Return why shards of this parameter cannot have scales, or "" if they can. The same on all ranks."""
    leading = count_leading_dims(parameter.shape)
    if any(2 <= dim < leading or dim > leading for _, dim in _list_sharded_dims(parameter)):
        return "it is sharded in a dim that is neither one of the first two nor the first of its rows"
    return ""


def find_cut_axes(parameter: Tensor) -> tuple[int, ...]:
    """Find the mesh axes that cut rows within a block, so that their ranks share blocks. The same on all ranks."""
    leading = count_leading_dims(parameter.shape)
    axes = tuple(axis for axis, dim in _list_sharded_dims(parameter) if dim == leading > 0)
    if len(axes) == 1 and isinstance(parameter, DTensor):
        length = -(-parameter.shape[leading] // parameter.device_mesh.size(axes[0]))
        if length * prod(parameter.shape[leading + 1 :]) % MOMENT_BLOCK_ELEMENTS == 0:
            return ()
    return axes


def to_blocks(matrix: Tensor, grid: BlockGrid) -> Tensor:
    """Convert rows [R, columns] to blocks [R * grid.blocks_per_row, 256], padded with zeros."""
    if not grid.columns:
        return matrix.new_empty(0, MOMENT_BLOCK_ELEMENTS)
    trailing = grid.blocks_per_row * MOMENT_BLOCK_ELEMENTS - grid.offset_in_block - grid.columns
    if grid.offset_in_block or trailing:
        matrix = F.pad(matrix, (grid.offset_in_block, trailing))
    return matrix.reshape(-1, MOMENT_BLOCK_ELEMENTS)


def from_blocks(blocks: Tensor, grid: BlockGrid) -> Tensor:
    """Undo `to_blocks`: return a view of rows [R, columns]."""
    if not grid.columns:
        return blocks.new_empty(grid.rows, 0)
    rows = blocks.view(-1, grid.blocks_per_row * MOMENT_BLOCK_ELEMENTS)
    return rows.narrow(1, grid.offset_in_block, grid.columns)


class RowSpan(NamedTuple):
    """Rows `start` to `end` of a parameter's grid, and the key of its random bits."""

    grid: BlockGrid
    start: int
    end: int
    key: int

    @property
    def num_blocks(self) -> int:
        return (self.end - self.start) * self.grid.blocks_per_row


def number_blocks(spans: Sequence[RowSpan], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the parameter's key and the block's number for each block of these spans, int32 [B].

    The number of operations does not depend on the number of spans.
    """
    starts = [0, *accumulate(span.num_blocks for span in spans)]
    rows = [
        (start, span.start, span.grid.blocks_per_row, *span.grid[3:], span.key - (span.key >> 31 << 32))
        for span, start in zip(spans, starts, strict=False)
    ]
    table = torch.tensor(rows, device=device)
    ids = torch.arange(starts[-1], device=device)
    first_id, first_row, blocks_per_row, first_block, rows_per_outer, blocks_per_outer, blocks_per_whole_row, key = (
        table[torch.searchsorted(table[:, 0].contiguous(), ids, right=True) - 1].unbind(1)
    )
    row = first_row + (ids - first_id) // blocks_per_row
    first_of_row = first_block + row // rows_per_outer * blocks_per_outer + row % rows_per_outer * blocks_per_whole_row
    number = first_of_row + (ids - first_id) % blocks_per_row
    return key.to(torch.int32), number.to(torch.int32)
