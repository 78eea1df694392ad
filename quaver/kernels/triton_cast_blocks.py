"""Casts blocks on NVIDIA GPUs, in Triton, bit-identical to quaver/recipes/scaling.py, in one read of the matrix.

One program casts one tile of whole blocks: one block, or several smaller blocks in a tile of at least 32 x 32. To cast
blocks along rows and along columns at once, a tile has as many rows as a block has elements, and at least 128 columns.
Elements outside the matrix are read as 0 and not written. Column codes have strides (1, R). A tile with column codes is
one column block high, so the permutation of its rows does not matter ([Note: transposing a tile] in triton_blocks.py).

If R, C or the address in bytes is not a multiple of 16, both directions of 1 x n take two casts, which read the matrix
twice. A tile for both directions with narrow accesses would need more registers than a thread has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quaver.kernels.operands import (
    BlockCast,
    FlatOperands,
    Operands,
    empty_block_scales,
    has_column_major_scales,
    pair_codes,
    unflatten_operands,
)
from quaver.kernels.triton_blocks import (
    KernelTile,
    amax_to_quant_scale,
    apply_scale,
    compute_amax_bits,
    compute_scales,
    empty_codes,
    get_magnitude_bits,
    hide_from_cse,
    jit,
    launch,
    load_tile,
    load_tile_in_float32,
    make_cast_target,
    make_mask,
    store_column_codes,
    store_row_codes,
    supports,
    to_dequant_scale,
    to_float8,
    widen,
)
from quaver.recipes import e8m0
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scale_rules import SCALE_RULES

try:
    import triton.language as tl
except ImportError:  # PyTorch for CPUs lacks it
    tl = None


class BlockRule(NamedTuple):
    """The size of blocks, and the rule of their scales."""

    rows: int
    columns: int
    is_e8m0: bool
    offset: int
    """`e8m0.compute_bits_offset`, for E8M0 scales."""


def _make_block_rule(rows: int, columns: int, float8_dtype: torch.dtype, rule: str) -> BlockRule:
    is_e8m0 = bool(rule) and rule not in SCALE_RULES
    return BlockRule(rows, columns, is_e8m0, e8m0.compute_bits_offset(float8_dtype, rule) if is_e8m0 else 0)


def cast_blockwise(hp: Tensor, cast: BlockCast) -> Operands | None:
    """Run `recipes.scaling.dynamic_cast_blocks` on `hp` [R, C] along rows and columns. Square blocks are cast once."""
    if not supports(hp, cast.float8_dtype, cast.rule):
        return None
    layout = ScaleLayout(cast.dot_products, cast.length)
    if cast.dot_products == cast.length:
        return _cast_one_layout(hp, cast, layout)
    is_aligned = hp.data_ptr() % 16 == 0 and casts_both_directions_at_once(*hp.shape)
    if cast.row and cast.column and cast.dot_products == 1 and is_aligned:
        return _cast_both_layouts(hp, cast)
    return Operands(
        _cast_one_layout(hp, cast._replace(column=False), layout).row if cast.row else None,
        _cast_one_layout(hp, cast._replace(row=False), layout.t()).column if cast.column else None,
    )


def casts_both_directions_at_once(rows: int, columns: int) -> bool:
    """Return whether one kernel casts an aligned matrix [rows, columns] in blocks of 1 x n in both directions."""
    return rows % 16 == columns % 16 == 0


def _make_tile(rows: int, columns: int, warps: int, rows_of_thread: int) -> KernelTile:
    return KernelTile(rows, columns, warps, rows_of_thread, column_codes_of_store=8 if rows == columns else 16)


def _cast_both_layouts(hp: Tensor, block_cast: BlockCast) -> Operands:
    """Quantize blocks [1, length] for row codes and [length, 1] for column codes.

    A thread has 64 elements. With at most 128 registers, two programs of 256 threads share a multiprocessor, so that
    one computes while the other waits for memory. Programs of 64 threads need no limit.
    """
    float8_dtype, row, column, power_of_2, _, length, rule = block_cast
    row_codes, column_codes = empty_codes(hp, float8_dtype, row, column)
    layout = ScaleLayout(1, length)
    row_scales = empty_block_scales(hp, layout, is_column_major=True)
    column_scales = empty_block_scales(hp, layout.t(), is_column_major=False)
    columns = max(length, 128)
    tile = _make_tile(length, columns, length * columns // 2048, hp.element_size() * 4)
    cast = make_cast_target(float8_dtype, power_of_2, rule)
    blocks = _make_block_rule(length, length, float8_dtype, rule)
    results = row_codes, *row_scales, column_codes, *column_scales
    registers = 128 if tile.warps == 8 else None
    launch(_cast_rows_and_columns, hp, tile, *results, CAST=cast, BLOCKS=blocks, maxnreg=registers)
    return unflatten_operands(FlatOperands(*results), row, column, layout)


def _cast_one_layout(hp: Tensor, block_cast: BlockCast, layout: ScaleLayout) -> Operands:
    """Quantize blocks of one shape, in one read of the matrix. `layout`: of the codes that are requested."""
    float8_dtype, row, column, power_of_2, _, _, rule = block_cast
    codes = empty_codes(hp, float8_dtype, row, column)
    quant, dequant = empty_block_scales(hp, layout, is_column_major=has_column_major_scales(layout, row))
    rows, columns = (max(size, 32) for size in layout.block_size)
    rows_of_thread = hp.element_size() * 2 if column else 1
    tile, cast = (
        _make_tile(rows, columns, rows * columns // 1024, rows_of_thread),
        make_cast_target(float8_dtype, power_of_2, rule),
    )
    blocks = _make_block_rule(*layout.block_size, float8_dtype, rule)
    launch(_cast_blocks, hp, tile, *codes, quant, dequant, *dequant.stride(), CAST=cast, BLOCKS=blocks)
    return pair_codes(*codes, quant, dequant, layout)


@jit
def _cast_blocks(
    hp_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    down_stride: tl.tensor,
    across_stride: tl.tensor,
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
    hp, r, c = load_tile_in_float32(hp_ptr, tl.program_id(0), rows, columns, TILE)
    magnitudes = tl.reshape(get_magnitude_bits(hp), [DOWN, BLOCKS.rows, ACROSS, BLOCKS.columns])
    quant, dequant = _compute_block_scales(tl.max(tl.max(magnitudes, 3), 1), CAST, BLOCKS)
    factor = dequant if CAST.divides else quant
    element_scales = tl.broadcast_to(factor[:, None, :, None], [DOWN, BLOCKS.rows, ACROSS, BLOCKS.columns])
    element_scales = tl.reshape(element_scales, [TILE.rows, TILE.columns])
    codes = to_float8(apply_scale(hp, element_scales, element_scales, CAST), CAST)
    if row_codes_ptr is not None:
        store_row_codes(row_codes_ptr, codes, r, c, rows, columns)
    if column_codes_ptr is not None:
        store_column_codes(column_codes_ptr, codes, tl.program_id(0), c, rows, columns, TILE)
    i, j = tile_r * DOWN + tl.arange(0, DOWN), tile_c * ACROSS + tl.arange(0, ACROSS)
    blocks_down, blocks_across = tl.cdiv(rows, BLOCKS.rows), tl.cdiv(columns, BLOCKS.columns)
    mask = make_mask(i, blocks_down, j, blocks_across)
    tl.store(quant_ptr + i[:, None] * blocks_across + j[None, :], quant, mask=mask)
    tl.store(dequant_ptr + i[:, None] * down_stride + j[None, :] * across_stride, dequant, mask=mask)


@jit
def _cast_rows_and_columns(
    hp_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    row_quant_ptr: tl.tensor,
    row_dequant_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    column_quant_ptr: tl.tensor,
    column_dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Cast a tile that is one column block high, in both directions. `BLOCKS` holds the block length twice.

    A thread keeps the tile in the dtype of hp and widens it for each direction; see `hide_from_cse`.
    """
    ACROSS: tl.constexpr = TILE.columns // BLOCKS.columns
    tiles_across = tl.cdiv(columns, TILE.columns)
    tile_r, tile_c = (tl.program_id(0) // tiles_across).to(tl.int64), (tl.program_id(0) % tiles_across).to(tl.int64)
    hp, r, c = load_tile(hp_ptr, tl.program_id(0), rows, columns, TILE)
    bits = compute_amax_bits(tl.reshape(hp, [TILE.rows, ACROSS, BLOCKS.columns]), 2)
    quant, dequant = _compute_block_scales(bits, CAST, BLOCKS)
    j, blocks_across = tile_c * ACROSS + tl.arange(0, ACROSS), tl.cdiv(columns, BLOCKS.columns)
    mask = make_mask(r, rows, j, blocks_across)
    tl.store(row_quant_ptr + r[:, None] * blocks_across + j[None, :], quant, mask=mask)
    tl.store(row_dequant_ptr + j[None, :] * rows + r[:, None], dequant, mask=mask)
    factor = dequant if CAST.divides else quant
    element_scales = tl.broadcast_to(factor[:, :, None], [TILE.rows, ACROSS, BLOCKS.columns])
    element_scales = tl.reshape(element_scales, [TILE.rows, TILE.columns])
    hp = hide_from_cse(hp)
    codes = to_float8(apply_scale(widen(hp), element_scales, element_scales, CAST), CAST)
    store_row_codes(row_codes_ptr, codes, r, c, rows, columns)
    hp = hide_from_cse(hp)
    quant, dequant = _compute_block_scales(compute_amax_bits(hp, 0), CAST, BLOCKS)
    tl.store(column_quant_ptr + tile_r * columns + c, quant, mask=c < columns)
    tl.store(column_dequant_ptr + tile_r * columns + c, dequant, mask=c < columns)
    codes = to_float8(apply_scale(widen(hide_from_cse(hp)), quant[None, :], dequant[None, :], CAST), CAST)
    store_column_codes(column_codes_ptr, codes, tl.program_id(0), c, rows, columns, TILE)


@jit
def _compute_block_scales(bits: tl.tensor, CAST: tl.constexpr, BLOCKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Compute the quant_scales and dequant_scales of blocks from the bits of their amaxes."""
    amax = bits.to(tl.float32, bitcast=True)
    if BLOCKS.is_e8m0:
        exponent = tl.maximum((bits + BLOCKS.offset) & -(1 << 23), 0)
        nan_or_0 = amax * 0.0
        quant = ((254 << 23) - exponent).to(tl.float32, bitcast=True) + nan_or_0
        dequant = tl.maximum(exponent, 1 << 22).to(tl.float32, bitcast=True) + nan_or_0
    elif CAST.by_rule:
        quant, dequant = compute_scales(amax, CAST)
    else:
        quant = tl.where(bits == 0, 1.0, amax_to_quant_scale(amax, CAST))
        dequant = to_dequant_scale(quant, CAST)
    return quant, dequant
