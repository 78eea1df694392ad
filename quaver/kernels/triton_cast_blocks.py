"""The cast of blocks on NVIDIA GPUs, in Triton: the bits of quaver/scaling.py, in one read of the matrix.

One program casts one tile of whole blocks: a block, or blocks up to 32 rows and columns. Elements outside the matrix
are read as 0 and not written. Codes are row-major in both directions; gemm.py lays them out for the matmul.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quaver.kernels.places import Places, of_blocks
from quaver.kernels.triton_blocks import (
    Tile,
    cast_to,
    inside,
    jit,
    launch,
    magnitude_bits,
    store_row_codes,
    to_float8,
    to_quant_scale,
    widen,
)
from quaver.scaling import block_counts, e8m0_offset

try:
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    tl = None


class Blocks(NamedTuple):
    """The size of blocks, and the rule of their scales."""

    rows: int
    columns: int
    is_e8m0: bool
    offset: int
    """`e8m0_offset` of E8M0."""


def cast_blockwise(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    dot_products: int,
    length: int,
    mode: str,
) -> Places:
    """`quaver.scaling.dynamic_cast_blocks` of an `hp` [R, C] that triton_cast.py takes, along rows and along columns.

    Returns:
        The six places of cast.py; square blocks are cast once.
    """

    def cast(block_size: tuple[int, int]) -> Places:
        return _cast(hp, float8_dtype, power_of_2, block_size, mode)

    return of_blocks(cast, row, column, dot_products, length)


def _cast(
    hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool, block_size: tuple[int, int], mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty_like(hp, dtype=float8_dtype)
    counts = block_counts(hp.shape[0], hp.shape[1], block_size)
    quant, dequant = (hp.new_empty(counts, dtype=torch.float32) for _ in range(2))
    rows, columns = (max(size, 32) for size in block_size)
    tile, cast = Tile(rows, columns, warps=rows * columns // 1024), cast_to(float8_dtype, power_of_2)
    blocks = Blocks(*block_size, bool(mode), e8m0_offset(float8_dtype, mode))
    launch(_cast_blocks, hp, tile, codes, quant, dequant, CAST=cast, BLOCKS=blocks)
    return codes, quant, dequant


@jit
def _cast_blocks(
    hp_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    DOWN: tl.constexpr = TILE.rows // BLOCKS.rows
    ACROSS: tl.constexpr = TILE.columns // BLOCKS.columns
    tiles_across = tl.cdiv(columns, TILE.columns)
    tile_r, tile_c = (tl.program_id(0) // tiles_across).to(tl.int64), (tl.program_id(0) % tiles_across).to(tl.int64)
    r, c = tile_r * TILE.rows + tl.arange(0, TILE.rows), tile_c * TILE.columns + tl.arange(0, TILE.columns)
    hp = widen(tl.load(hp_ptr + r[:, None] * columns + c[None, :], mask=inside(r, rows, c, columns), other=0.0))
    magnitudes = tl.reshape(magnitude_bits(hp), [DOWN, BLOCKS.rows, ACROSS, BLOCKS.columns])
    bits = tl.max(tl.max(magnitudes, 3), 1)
    amax = bits.to(tl.float32, bitcast=True)
    if BLOCKS.is_e8m0:
        exponent = tl.maximum((bits + BLOCKS.offset) & -(1 << 23), 0)
        nan_or_0 = amax * 0.0
        quant = ((254 << 23) - exponent).to(tl.float32, bitcast=True) + nan_or_0
        dequant = tl.maximum(exponent, 1 << 22).to(tl.float32, bitcast=True) + nan_or_0
    else:
        quant = tl.where(bits == 0, 1.0, to_quant_scale(amax, CAST))
        dequant = tl.div_rn(1.0, quant)
    of_elements = tl.broadcast_to(quant[:, None, :, None], [DOWN, BLOCKS.rows, ACROSS, BLOCKS.columns])
    codes = to_float8(hp * tl.reshape(of_elements, [TILE.rows, TILE.columns]), CAST)
    store_row_codes(codes_ptr, codes, r, c, rows, columns)
    i, j = tile_r * DOWN + tl.arange(0, DOWN), tile_c * ACROSS + tl.arange(0, ACROSS)
    down, across = tl.cdiv(rows, BLOCKS.rows), tl.cdiv(columns, BLOCKS.columns)
    positions, mask = i[:, None] * across + j[None, :], inside(i, down, j, across)
    tl.store(quant_ptr + positions, quant, mask=mask)
    tl.store(dequant_ptr + positions, dequant, mask=mask)
