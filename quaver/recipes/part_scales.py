"""Computes amaxes and selects scales for a part of a matrix, such as a shard, in blocks of the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import compute_amax, compute_block_amax


def _find_block_range(offset: int, n: int, length: int) -> tuple[int, int, int]:
    """Find the blocks of `length` elements (or `ALL`) that `n` elements starting at `offset` touch.

    Returns:
        The index of the first block, the number of blocks, and the elements of the first block before `offset`.
    """
    if length == ALL:
        return 0, 1, 0
    first, before = divmod(offset, length)
    return first, -(-(before + n) // length) if n else 0, before


def compute_part_amaxes(part: Tensor, offset: Sequence[int], layout: ScaleLayout) -> tuple[Tensor, list[int]]:
    """Compute the amaxes of a part of a matrix in blocks of the whole matrix. The part may begin inside a block.

    Args:
        part: [r, c], with elements.
        offset: the row and the column of its first element.
        layout: tensorwise, rowwise or of blocks.
    Returns:
        [blocks, blocks], the amax of each block that the part touches, from the part's elements only; and the row and
        column of the first of these blocks in the whole matrix.
    """
    ranges = list(map(_find_block_range, offset, part.shape, layout.block_size))
    first_block, before = [first for first, _, _ in ranges], [elements for _, _, elements in ranges]
    if layout.is_tensorwise:
        return compute_amax(part).view(1, 1), first_block
    if layout.columns == ALL:
        return compute_amax(part, 1), first_block
    padding = (before[1], 0, before[0], 0)  # zeros for the elements of the first blocks that other parts hold
    return compute_block_amax(F.pad(part, padding) if any(before) else part, layout), first_block


def select_part_scales(
    scales: Tensor, offset: Sequence[int], size: Sequence[int], layout: ScaleLayout
) -> tuple[Tensor, ScaleLayout]:
    """Return the scales of a part of a matrix, and their layout in the part.

    If the part begins inside a block, each of its rows (or columns) gets the scale of its block.

    Args:
        scales: the scales of the whole matrix, two dims.
        offset: the row and the column of the part's first element.
        size: the rows and columns of the part.
        layout: the layout of the whole matrix.
    """
    lengths = list(layout.block_size)
    for dim, (start, n) in enumerate(zip(offset, size, strict=True)):
        length = lengths[dim]
        first, blocks, before = _find_block_range(start, n, length)
        scales = scales.narrow(dim, first, blocks)
        if before and n:
            scales, lengths[dim] = scales.repeat_interleave(length, dim).narrow(dim, before, n), 1
    return scales, layout._replace(rows=lengths[0], columns=lengths[1])
