"""The amaxes of a matrix, of its rows, of its columns and of groups of rows, in Triton, in one read.

    amax = max |hp|        row_amax[r] = max |hp[r, :]|        column_amax[c] = max |hp[:, c]|
    group_amax[g, c] = max |hp[r, c]| over the rows r of group g

Programs combine their amaxes by atomic maxima of the bits of magnitudes, which order like the magnitudes with NaNs on
top. So NaN propagates, and results do not depend on the order or the number of programs. triton_blocks.py describes the
grid, the tiles and the mask.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from quaver.kernels.operands import require
from quaver.kernels.triton_blocks import (
    choose_tile,
    get_magnitude_bits,
    jit,
    launch,
    load_tile_in_float32,
    supports_matrix,
    view_bits,
)

with contextlib.suppress(ImportError):  # PyTorch for CPUs lacks it
    import triton.language as tl


def compute_amax(hp: Tensor, dim: int | None) -> Tensor | None:
    """Run `recipes.scaling.compute_amax` on `hp` [R, C]: float32 (), [R, 1] for dim 1, [1, C] for dim 0.

    Returns None for a matrix that the kernels do not support.
    """
    if not supports_matrix(hp):
        return None
    if dim is None:
        return compute_amax_unless_scale_known(hp, None)[0]
    row_amax, column_amax = compute_amax_by_dim(hp, rows=dim == 1, columns=dim == 0)
    return require(row_amax if dim == 1 else column_amax, "the amax")


def compute_amax_unless_scale_known(hp: Tensor, quant_scale: Tensor | None) -> Tensor:
    """Compute float32 [2]: the amax of `hp`, or 0 if a persistent `quant_scale` () is above 0; and 0.

    If the scale is above 0, no program reads `hp`. Only the device can check it, so the kernel is always launched.
    """
    recorded_amax = hp.new_zeros(2, dtype=torch.float32)
    launch(_amax, hp, choose_tile(hp), quant_scale, recorded_amax, None, None)
    return recorded_amax


def compute_amax_by_dim(hp: Tensor, *, rows: bool, columns: bool) -> tuple[Tensor | None, Tensor | None]:
    """Compute the amaxes of rows, float32 [R, 1], and of columns, [1, C]; None if not requested."""
    height, width = hp.shape
    zeros = hp.new_zeros(height * rows + width * columns, dtype=torch.float32)  # one fill kernel for both
    row_amax = zeros[:height].view(height, 1) if rows else None
    column_amax = zeros[height * rows :].view(1, width) if columns else None
    launch(_amax, hp, choose_tile(hp), None, None, row_amax, column_amax)
    return row_amax, column_amax


def group_amax(hp: Tensor, group: Tensor, num_groups: int) -> Tensor | None:
    """Compute float32 [num_groups, C]: the amax of each column of `hp` [R, C], over the rows of each group.

    Returns None for a matrix that the kernels do not support.

    Args:
        group: int64 [R], the group of each row. A program loops from the smallest to the largest group of its rows, so
            it is fast if rows are sorted by group.
    """
    if not supports_matrix(hp):
        return None
    amaxes = hp.new_zeros(num_groups, hp.shape[1], dtype=torch.float32)
    launch(_group_amax, hp, choose_tile(hp), group.contiguous(), amaxes)
    return amaxes


@jit
def _amax(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    known_scale = 0.0 if quant_scale_ptr is None else tl.load(quant_scale_ptr)
    if not (known_scale > 0):
        hp, r, c = load_tile_in_float32(hp_ptr, tl.program_id(0), rows, columns, TILE)
        bits = get_magnitude_bits(hp)
        if amax_ptr is not None:
            largest = tl.max(bits)
            # The amax at amax_ptr only grows. Most programs read a larger value there and need no atomic.
            tl.atomic_max(view_bits(amax_ptr), largest, mask=largest > tl.load(view_bits(amax_ptr)), sem="relaxed")
        if row_amax_ptr is not None:
            tl.atomic_max(view_bits(row_amax_ptr) + r, tl.max(bits, 1), mask=r < rows, sem="relaxed")
        if column_amax_ptr is not None:
            tl.atomic_max(view_bits(column_amax_ptr) + c, tl.max(bits, 0), mask=c < columns, sem="relaxed")


@jit
def _group_amax(
    hp_ptr: tl.tensor,
    group_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    hp, r, c = load_tile_in_float32(hp_ptr, tl.program_id(0), rows, columns, TILE)
    bits = get_magnitude_bits(hp)
    group = tl.load(group_ptr + tl.minimum(r, rows - 1))  # rows past the end are masked: their bits are 0
    current, last = tl.min(group), tl.max(group)  # usually equal: one group per tile
    while current <= last:  # not a range, whose bounds the interpreter of Triton 3.6 cannot read with NumPy 2.4
        largest = tl.max(tl.where((group == current)[:, None], bits, 0), 0)
        amax_of_group = view_bits(amax_ptr) + current * columns + c
        tl.atomic_max(amax_of_group, largest, mask=(c < columns) & (largest > 0), sem="relaxed")
        current += 1
