"""Rows that belong to groups, the tokens or the weights of each expert: where groups and their scales begin.

    groups of tokens     ends [E], int32: group g is rows ends[g - 1] to ends[g]; later rows belong to no group
    groups of weights    no ends: E groups of equal size, a weight [E, R, C] as [E * R, C]

Each group is scaled as a separate matrix. It has its own amax if tensorwise and its own column scales if rowwise, and
its blocks begin at its first row. In this table ALL is all rows of a group, or all columns (recipes/scale_layout.py):

    granularity       row codes      column codes     scales
    tensorwise        ALL x ALL      the same         [E]
    rowwise           1 x ALL        ALL x 1          [rows, 1] and [E, columns]
    blockwise r x c   r x c          c x r            [rows of scales, ceil(columns / c)]; r rows of a group share one

[Note: scale rows] The blocks of group g, of r rows each, begin at row start // r + g of the scales. Without gaps they
would begin after all earlier blocks, whose number only the device knows. The rows of two groups do not overlap, because
ceil(n / r) <= (start + n) // r - start // r + 1. There are rows // r + E rows of scales, some of them unused.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.operands import Operand, require
from quaver.recipes.cast_config import ScalingGranularity
from quaver.recipes.scale_layout import ALL, ScaleLayout


class ExpertMatmul(enum.Enum):
    """Which of an expert's three matmuls; gemm.py has the table."""

    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"

    def reads_rows(self, transposed: bool) -> bool:
        """Return whether dot products run along stored rows of the weight. GRAD_WEIGHT reads no weight."""
        return (self is ExpertMatmul.OUTPUT) is not transposed


def find_group_bounds(ends: Tensor | None, num_groups: int, rows: int) -> list[tuple[int, int]]:
    """Return where each group begins and ends. Reads `ends` on the host.

    Raises:
        ValueError: the ends descend, or exceed the rows of the matrix.
    """
    if ends is None:
        return [(g * (rows // num_groups), (g + 1) * (rows // num_groups)) for g in range(num_groups)]
    if ends.shape != (num_groups,):
        raise ValueError(f"offs: expected {num_groups} ends, got a tensor of {list(ends.shape)}")
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    if any(start > stop for start, stop in zip(starts, stops, strict=True)) or stops[-1] > rows:
        raise ValueError(f"offs: expected ends that ascend from 0 to at most the {rows} rows of a, got {stops}")
    return list(zip(starts, stops, strict=True))


def find_groups(ends: Tensor | None, num_groups: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the group of each row, int64 [rows], and the first row of each group, int64 [num_groups].

    Rows past the last end have the group `num_groups`.
    """
    row_indices = torch.arange(rows, device=device)
    if ends is None:
        rows_per_group = rows // num_groups
        return row_indices // max(rows_per_group, 1), torch.arange(num_groups, device=device) * rows_per_group
    stops = ends.long()
    return torch.searchsorted(stops, row_indices, right=True), F.pad(stops[:-1], (1, 0))


def count_scale_rows(block_rows: int, num_groups: int, rows: int) -> int:
    """Return the number of rows of the scales; see [Note: scale rows]."""
    return num_groups if block_rows == ALL else rows if block_rows == 1 else rows // block_rows + num_groups


def get_scale_shape(layout: ScaleLayout, num_groups: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of groups; see the table at the top of the file."""
    count = count_scale_rows(layout.rows, num_groups, rows)
    return (count,) if layout.is_tensorwise else (count, layout.get_scale_shape(1, columns)[1])


def arrange_scale_rows(scale: Tensor, rows: int, block_rows: int) -> Tensor:
    """Arrange the scales [E, blocks, columns] of E matrices of `rows` rows as in [Note: scale rows]."""
    num_groups, blocks, columns = scale.shape
    group_indices = torch.arange(num_groups, device=scale.device)
    first = group_indices * rows // block_rows + group_indices
    scales = scale.new_zeros(count_scale_rows(block_rows, num_groups, num_groups * rows), columns)
    return scales.index_copy(
        0, (first[:, None] + torch.arange(blocks, device=scale.device)).view(-1), scale.flatten(0, 1)
    )


def find_first_scale_row(block_rows: int, group: int, start: int) -> int:
    """Return the row of the scale of a group's first block; see [Note: scale rows]."""
    return group if block_rows == ALL else start if block_rows == 1 else start // block_rows + group


def select_group(operand: Operand, group: int, start: int, stop: int) -> Operand:
    """Return the rows of one group as an operand of a matmul."""
    scale, layout = operand.dequant_scale, operand.layout
    if scale is not None and scale.dim() == 1:
        scale = scale[group]
    elif scale is not None:
        count = 1 if layout.rows == ALL else -(-(stop - start) // layout.rows)
        scale = scale.narrow(0, find_first_scale_row(layout.rows, group, start), count)
    return Operand(operand.data[start:stop], scale, layout)


def get_cast_layout(granularity: str, dot_products: int, length: int) -> ScaleLayout:
    """Return the layout of row codes; see the table at the top of the file."""
    layout = ScalingGranularity(granularity).get_layout((dot_products, length))
    if layout is None:
        raise NotImplementedError(f"experts: {granularity} casts do not say which elements share a scale")
    return layout


def expand_row_scales(operand: Operand, ends: Tensor | None, num_groups: int) -> tuple[Tensor, ScaleLayout]:
    """Return the dequant_scale of each row, [rows, blocks of columns], and its layout.

    The scales of rows outside every group are 0, except with a scale per row.
    """
    scale, layout, rows = require(operand.dequant_scale, "the dequant_scale"), operand.layout, operand.data.shape[0]
    scale_row = find_scale_rows(ends, num_groups, rows, layout.rows, operand.data.device)
    padded = F.pad(scale.view(len(scale), -1), (0, 0, 0, 1))  # the last row is for rows outside every group
    return padded[scale_row], ScaleLayout(1, layout.columns)


def find_scale_rows(ends: Tensor | None, num_groups: int, rows: int, block_rows: int, device: torch.device) -> Tensor:
    """Return, for each row, the index of its row of scales, int64 [rows].

    Rows outside every group get `count_scale_rows`, unless every row has its own scale (`block_rows` is 1).
    """
    row_indices = torch.arange(rows, device=device)
    if block_rows == 1:
        return row_indices
    group, starts = find_groups(ends, num_groups, rows, device)
    if block_rows == ALL:
        return group
    start = F.pad(starts, (0, 1))[group]
    scale_row = start // block_rows + group + (row_indices - start) // block_rows
    return scale_row.where(group < num_groups, count_scale_rows(block_rows, num_groups, rows))
