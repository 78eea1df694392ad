"""The cast with one scale a row, from one read, on an NVIDIA GPU, in Triton: the oracle's bits (scaling.py, dim 1).

    quant[r]    = RN32(max / amax of row r), capped, optionally rounded down to 2^k
    codes[r]    = RNE8(clamp(RN32(float32(hp[r]) * quant[r]), -max, max))
    dequant[r]  = RN32(1 / quant[r])

and, where wanted, the sum of each column, for a bias.

Grid and tile: a tile is a few whole rows, which wait on the chip for their amaxes; `fits` says how wide they may be.
Each program has one tile. Where columns are added up, SUM_BLOCKS programs or fewer have a block of rows each, walk down
it with the next tile under way, and leave a row of float32 partial sums (triton_reduce.py adds them up). Which program
adds which rows depends on the matrix's shape alone, so the sums are the same in every run.
Mask: what lies outside the matrix is read as 0, and not written. Where C is a multiple of 16, loads and stores stay
whole. Positions are 64-bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels.triton_blocks import (
    INTERPRETED,
    TRITON_FLOAT8,
    dealt_offsets,
    jit,
    magnitude_bits,
    own_dequant_scale,
    own_quant_scale,
    to_float8,
    widen,
)
from quaver.scaling import EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

WIDEST = 32768
"""Columns of a row that fits on the chip."""
WIDEST_BYTES_WITH_SUMS = 32768
"""Bytes of it, beside sums of the columns; half of that where loads are narrow and positions take registers."""
TILE_ELEMENTS = 4096
"""Of a tile of narrow rows."""
ELEMENTS_OF_THREAD = 32
SUM_BLOCKS = 512
SUM_ROWS = 32
"""The fewest rows of a block: its partial sums are 8 bytes of traffic for each of its columns."""


class CastRows(NamedTuple):
    """What came of the cast of a matrix [R, C] by rows."""

    codes: Tensor
    """float8 [R, C]."""
    quant_scale: Tensor
    dequant_scale: Tensor
    """float32 [R, 1]."""
    partial_sums: Tensor | None
    """float32 [blocks of rows, C]."""


def fits(hp: Tensor, *, sums: bool) -> bool:
    """Whether rows of `hp` [R, C] fit on the chip."""
    width = hp.shape[1]
    if not sums:
        return width <= WIDEST
    return width * hp.element_size() * (2 if width % 16 else 1) <= WIDEST_BYTES_WITH_SUMS


def cast_rows(hp: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False, sums: bool = False) -> CastRows:
    """`quaver.scaling.dynamic_cast` along dim 1, of an `hp` [R, C] that is not empty, `triton_blocks.takes` accepts and
    that `fits`; `sums`: with the sums of its columns."""
    fmt = format_of(float8_dtype)
    height, width = hp.shape
    tile_rows, tile_columns, warps = tile_of(width, sums=sums)
    block_rows = tile_rows
    if sums:
        block_rows *= triton.cdiv(max(height, SUM_BLOCKS * SUM_ROWS), SUM_BLOCKS * tile_rows)
    blocks = triton.cdiv(height, block_rows)
    codes = torch.empty_like(hp, dtype=float8_dtype)
    quant = hp.new_empty(height, 1, dtype=torch.float32)
    dequant = torch.empty_like(quant)
    partial_sums = hp.new_empty(blocks, width, dtype=torch.float32) if sums else None
    with torch.cuda.device_of(hp):
        _cast_rows[(blocks,)](
            hp,
            codes,
            quant,
            dequant,
            partial_sums,
            height,
            width,
            block_rows,
            MAX=fmt.max,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=warps,
        )
    return CastRows(codes, quant, dequant, partial_sums)


def tile_of(width: int, *, sums: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile: ELEMENTS_OF_THREAD for each thread, half as many beside sums."""
    columns = max(triton.next_power_of_2(width), 16)
    rows = max(TILE_ELEMENTS // columns, 1)
    return rows, columns, rows * columns // (32 * ELEMENTS_OF_THREAD) * (2 if sums else 1)


@jit
def _cast_rows(
    hp_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    block_rows: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * block_rows
    end = tl.minimum(row + block_rows, rows)
    down = tl.arange(0, TILE_ROWS)
    c = dealt_offsets(hp_ptr, TILE_COLUMNS)
    in_tile = down.to(tl.int64)[:, None] * columns + c[None, :]
    across = (c < columns)[None, :]
    hp = tl.load(hp_ptr + row * columns + in_tile, mask=(row + down < end)[:, None] & across, other=0.0)
    if sums_ptr is None:
        wide = widen(hp, INTERPRETED)
        quant = _quant_scales(wide, quant_ptr, dequant_ptr, row + down, end, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
        codes = to_float8(wide * quant[:, None], FLOAT8, INTERPRETED)
        tl.store(codes_ptr + row * columns + in_tile, codes, mask=(row + down < end)[:, None] & across)
    else:
        sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        while row < end:
            following = row + TILE_ROWS
            ahead_inside = (following + down < end)[:, None] & across
            ahead = tl.load(hp_ptr + following * columns + in_tile, mask=ahead_inside, other=0.0)
            wide = widen(hp, INTERPRETED)
            sums += wide
            quant = _quant_scales(wide, quant_ptr, dequant_ptr, row + down, end, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
            codes = to_float8(wide * quant[:, None], FLOAT8, INTERPRETED)
            tl.store(codes_ptr + row * columns + in_tile, codes, mask=(row + down < end)[:, None] & across)
            hp = ahead
            row = following
        sums_at = tl.program_id(0).to(tl.int64) * columns + c
        tl.store(sums_ptr + sums_at, tl.sum(sums, 0), mask=c < columns)


@jit
def _quant_scales(
    wide: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    r: tl.tensor,
    end: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
) -> tl.tensor:
    """float32 [TILE_ROWS]: the quant_scales of whole rows `r`, written with their dequant_scales."""
    amax = tl.max(magnitude_bits(wide), 1).to(tl.float32, bitcast=True)
    quant = own_quant_scale(amax, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
    tl.store(quant_ptr + r, quant, mask=r < end)
    tl.store(dequant_ptr + r, own_dequant_scale(quant), mask=r < end)
    return quant
