"""Rows that belong to groups: the tokens of each expert, or the weights of all; where groups and their scales begin.

    groups of tokens     ends [E], int32: group g has the rows from ends[g - 1] to ends[g]; none has rows past the last
    groups of weights    no ends: E groups with as many rows each, a weight [E, R, C] as [E * R, C]

The scales of a group are those of the group alone, as if it were a matrix of its own: it has its own amax tensorwise,
its own column scales row-wise, and its blocks begin at its first row. A layout (recipes/scale_layout.py) counts rows of
a group:

    granularity       row codes      column codes     scales
    tensorwise        ALL x ALL      the same         [E]
    rowwise           1 x ALL        ALL x 1          [rows, 1] and [E, columns]
    blockwise r x c   r x c          c x r            [rows of scales, ceil(columns / c)]; r rows of a group share one

[Note: scale rows] A scale's row cannot be where the number of earlier blocks puts it: a GPU would have to tell the host
how many there are. The blocks of r rows of group g begin at row start // r + g of the scales. Groups do not overlap
there, because ceil(n / r) <= (start + n) // r - start // r + 1, and rows // r + E rows are enough. Some stay unused.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.operands import Operand, expect
from quaver.recipes.cast_config import ScalingGranularity
from quaver.recipes.scale_layout import ALL, ScaleLayout


class Form(enum.Enum):
    """Which of an expert's three matmuls; gemm.py has the table."""

    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


def bounds_of(ends: Tensor | None, groups: int, rows: int) -> list[tuple[int, int]]:
    """Where each group begins and ends. Reads `ends` on the host.

    Raises:
        ValueError: ends that descend or lie outside of the matrix.
    """
    if ends is None:
        return [(g * (rows // groups), (g + 1) * (rows // groups)) for g in range(groups)]
    if ends.shape != (groups,):
        raise ValueError(f"offs: expected {groups} ends, got a tensor of {list(ends.shape)}")
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    if any(start > stop for start, stop in zip(starts, stops, strict=True)) or stops[-1] > rows:
        raise ValueError(f"offs: expected ends that ascend from 0 to at most the {rows} rows of a, got {stops}")
    return list(zip(starts, stops, strict=True))


def group_of_rows(ends: Tensor | None, groups: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row its group, int64 [rows], `groups` past the last end; and where each group begins, int64 [groups]."""
    numbers = torch.arange(rows, device=device)
    if ends is None:
        height = rows // groups
        return numbers // max(height, 1), torch.arange(groups, device=device) * height
    stops = ends.long()
    return torch.searchsorted(stops, numbers, right=True), F.pad(stops[:-1], (1, 0))


def count_of_scales(block_rows: int, groups: int, rows: int) -> int:
    """How many rows the scales have; see [Note: scale rows]."""
    return groups if block_rows == ALL else rows if block_rows == 1 else rows // block_rows + groups


def shape_of_scales(layout: ScaleLayout, groups: int, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of groups; see the table at the top."""
    count = count_of_scales(layout.rows, groups, rows)
    return (count,) if layout.is_tensorwise else (count, layout.scale_shape(1, columns)[1])


def in_scale_rows(scale: Tensor, rows: int, block_rows: int) -> Tensor:
    """The scales [E, blocks, columns] of E matrices of `rows` rows, as [Note: scale rows] lays them out."""
    groups, blocks, columns = scale.shape
    numbers = torch.arange(groups, device=scale.device)
    first = numbers * rows // block_rows + numbers
    scales = scale.new_zeros(count_of_scales(block_rows, groups, groups * rows), columns)
    return scales.index_copy(
        0, (first[:, None] + torch.arange(blocks, device=scale.device)).view(-1), scale.flatten(0, 1)
    )


def first_scale(block_rows: int, group: int, start: int) -> int:
    """The row of the scales of the first block of a group; see [Note: scale rows]."""
    return group if block_rows == ALL else start if block_rows == 1 else start // block_rows + group


def of_group(operand: Operand, group: int, start: int, stop: int) -> Operand:
    """The rows of one group, as an operand of one matmul."""
    scale, layout = operand.dequant_scale, operand.layout
    if scale is not None and scale.dim() == 1:
        scale = scale[group]
    elif scale is not None:
        count = 1 if layout.rows == ALL else -(-(stop - start) // layout.rows)
        scale = scale.narrow(0, first_scale(layout.rows, group, start), count)
    return Operand(operand.data[start:stop], scale, layout)


def layout_of_cast(granularity: str, block_options: Sequence[Any]) -> ScaleLayout:
    """The layout of row codes; see the table at the top."""
    layout = ScalingGranularity(granularity).layout(typing.cast("tuple[int, int]", tuple(block_options[:2])))
    if layout is None:
        raise NotImplementedError(f"experts: which elements of a {granularity} cast share a scale is not known")
    return layout


def scales_of_rows(operand: Operand, ends: Tensor | None, groups: int) -> tuple[Tensor, ScaleLayout]:
    """The dequant_scale of each row [rows, blocks of columns], and its layout; rows of no group have 0."""
    scale, layout, rows = expect(operand.dequant_scale), operand.layout, operand.data.shape[0]
    scale_row = scale_rows(ends, groups, rows, layout.rows, operand.data.device)
    with_none = F.pad(scale.view(len(scale), -1), (0, 0, 0, 1))
    return with_none[scale_row], ScaleLayout(1, layout.columns)


def scale_rows(ends: Tensor | None, groups: int, rows: int, block_rows: int, device: torch.device) -> Tensor:
    """For each row the row of its scale, int64 [rows]; `count_of_scales` for rows of no group."""
    numbers = torch.arange(rows, device=device)
    if block_rows == 1:
        return numbers
    group, starts = group_of_rows(ends, groups, rows, device)
    if block_rows == ALL:
        return group
    start = F.pad(starts, (0, 1))[group]
    scale_row = start // block_rows + group + (numbers - start) // block_rows
    return scale_row.where(group < groups, count_of_scales(block_rows, groups, rows))
