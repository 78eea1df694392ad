"""Rows that belong to groups: the tokens of each expert, or the weights of all; where groups and their scales begin.

    groups of tokens     ends [E], int32: group g has the rows from ends[g - 1] to ends[g]; none has rows past the last
    groups of weights    no ends: E groups with as many rows each, a weight [E, R, C] as [E * R, C]

The scales of a group are those of the group alone, as if it were a matrix of its own: it has its own amax tensorwise,
its own column scales row-wise, and its blocks begin at its first row. So each cast has blocks, of `rows` x `columns`:

    granularity       row codes      column codes     scales
    tensorwise        all x all      the same         [E]
    rowwise           1 x all        all x 1          [rows, 1] and [E, columns]
    blockwise r x c   r x c          c x r            [rows of scales, ceil(columns / c)]; r rows of a group share one

[Note: scale rows] A scale's row cannot be where the number of earlier blocks puts it: a GPU would have to tell the host
how many there are. The blocks of r rows of group g begin at row start // r + g of the scales. Groups do not overlap
there, because ceil(n / r) <= (start + n) // r - start // r + 1, and rows // r + E rows are enough. Some stay unused.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.cast_config import ALL, ScalingGranularity

Block = tuple[int, int]
"""The rows of a group and the columns that share a scale; `ALL` of them, or a number."""


class GroupedOperand(NamedTuple):
    """Groups of rows as one operand of grouped matmuls: float8 codes with scales, or a matrix in high precision."""

    data: Tensor
    """[rows, columns]."""
    dequant_scale: Tensor | None = None
    block_rows: int = ALL
    """How many rows of a group share a scale."""


class GroupedOperands(NamedTuple):
    """Groups of rows as both of their matmuls read them; None for one that was not asked for."""

    row: GroupedOperand | None
    column: GroupedOperand | None


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


def shape_of_scales(block: Block, groups: int, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of a cast with this block; see the table at the top."""
    count = count_of_scales(block[0], groups, rows)
    return (count,) if block == (ALL, ALL) else (count, 1 if block[1] == ALL else -(-columns // block[1]))


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


def scale_of_group(operand: GroupedOperand, group: int, start: int, stop: int) -> Tensor | None:
    """The scale of one group, as the matmul of one matrix takes it."""
    scale = operand.dequant_scale
    if scale is None:
        return None
    first = first_scale(operand.block_rows, group, start)
    count = 1 if operand.block_rows == ALL else -(-(stop - start) // operand.block_rows)
    return scale[group] if scale.dim() == 1 else scale.narrow(0, first, count)


def block_of(granularity: str, block_options: Sequence[Any]) -> Block:
    """The block of the row codes; that of the column codes is the same turned. See the table at the top."""
    block_size = tuple(block_options[:2]) or None
    sharing = ScalingGranularity(granularity).sharing(typing.cast("Block | None", block_size))
    if sharing is None:
        raise NotImplementedError(f"experts: which elements of a {granularity} cast share a scale is not known")
    return sharing


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
