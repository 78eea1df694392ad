"""Reductions of a matrix along its axes, on an NVIDIA GPU, in Triton.

    axis_amaxes    row_amax[r] = max |hp[r, :]|,  column_amax[c] = max |hp[:, c]|      from one read
    add_partials   sums[c] = partial_sums[0, c] + partial_sums[1, c] + ...             float32, in this order

Grid and tile of `axis_amaxes`: a program has FEWEST_BLOCK_ROWS to BLOCK_ROWS rows of as many columns as a warp loads at
once, so that a row's amax stays within a warp. It walks down, with the next tile under way, and keeps the amaxes of its
columns in registers. What programs found is joined by atomic maxima of bits, which order like magnitudes with NaNs on
top: neither the order of programs nor their number changes a result.
Grid and tile of `add_partials`: a program has 32 columns; its rows are added up in 32 strands, then the strands.
Mask: what lies outside is read as 0. Positions are 64-bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.triton_blocks import INTERPRETED, as_bits, dealt_offsets, jit, magnitude_bits, widen

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

TILE_ROWS = 16
WARPS = 4
BLOCK_ROWS = 256
FEWEST_BLOCK_ROWS = 64
PROGRAMS = 1024
"""As many as keep a GPU busy; below, blocks of rows are halved."""


def axis_amaxes(hp: Tensor, *, rows: bool, columns: bool) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes along the axes that are wanted, of an `hp` [R, C] that is not empty and `triton_blocks.takes` accepts.

    Returns:
        float32 [R, 1] and [1, C], None for what is not wanted.
    """
    height, width = hp.shape
    zeros = hp.new_zeros(height * rows + width * columns, dtype=torch.float32)  # one fill for both
    row_amax = zeros[:height].view(height, 1) if rows else None
    column_amax = zeros[height * rows :].view(1, width) if columns else None
    tile_columns = 512 // hp.element_size()
    across, block_rows = triton.cdiv(width, tile_columns), BLOCK_ROWS
    while block_rows > FEWEST_BLOCK_ROWS and across * triton.cdiv(height, block_rows) < PROGRAMS:
        block_rows //= 2
    with torch.cuda.device_of(hp):
        _axis_amaxes[(across * triton.cdiv(height, block_rows),)](
            hp,
            row_amax,
            column_amax,
            height,
            width,
            BLOCK_ROWS=block_rows,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=WARPS,
        )
    return row_amax, column_amax


def add_partials(partial_sums: Tensor) -> Tensor:
    """float32 [C]: the sums of the columns of float32 [partials, C], the same in every run."""
    partials, width = partial_sums.shape
    sums = partial_sums.new_empty(width)
    with torch.cuda.device_of(partial_sums):
        _add_partials[(triton.cdiv(width, 32),)](partial_sums, sums, partials, width, TILE=32, num_warps=WARPS)
    return sums


@jit
def _axis_amaxes(
    hp_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, TILE_COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * BLOCK_ROWS
    end = tl.minimum(row + BLOCK_ROWS, rows)
    c = (tl.program_id(0) % across).to(tl.int64) * TILE_COLUMNS + dealt_offsets(hp_ptr, TILE_COLUMNS)
    down = tl.arange(0, TILE_ROWS)
    in_tile = down.to(tl.int64)[:, None] * columns + c[None, :]
    inside = (c < columns)[None, :]
    hp = tl.load(hp_ptr + row * columns + in_tile, mask=(row + down < end)[:, None] & inside, other=0.0)
    of_columns = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    while row < end:
        following = row + TILE_ROWS
        mask = (following + down < end)[:, None] & inside
        ahead = tl.load(hp_ptr + following * columns + in_tile, mask=mask, other=0.0)
        bits = magnitude_bits(widen(hp, INTERPRETED))
        if row_amax_ptr is not None:
            tl.atomic_max(as_bits(row_amax_ptr) + row + down, tl.max(bits, 1), mask=row + down < end, sem="relaxed")
        if column_amax_ptr is not None:
            of_columns = tl.maximum(of_columns, bits)
        hp = ahead
        row = following
    if column_amax_ptr is not None:
        tl.atomic_max(as_bits(column_amax_ptr) + c, tl.max(of_columns, 0), mask=c < columns, sem="relaxed")


@jit
def _add_partials(
    partials_ptr: tl.tensor, sums_ptr: tl.tensor, partials: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> None:
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    strands = tl.zeros([TILE, TILE], tl.float32)
    row = tl.arange(0, TILE).to(tl.int64)
    first = 0
    while first < partials:
        at = row[:, None] * columns + c[None, :]
        strands += tl.load(partials_ptr + at, mask=(row < partials)[:, None] & (c < columns)[None, :], other=0.0)
        row += TILE
        first += TILE
    tl.store(sums_ptr + c, tl.sum(strands, 0), mask=c < columns)
