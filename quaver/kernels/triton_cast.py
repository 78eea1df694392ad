"""Casts a matrix [R, C] to float8 on NVIDIA GPUs, in Triton, bit-identical to recipes/scaling.py.

    row codes      [R, C], contiguous                for a matmul that contracts C
    column codes   [R, C] with strides (1, R)        for a matmul that contracts R

                                  scale of               bytes moved per bfloat16 element
                                                         row codes    column codes   both
    cast_tensorwise               the matrix's amax      5, 2 reads   5, 2 reads     6, 2 reads
    cast_rowwise                  row, column amaxes     3, 1 read    5, 2 reads     6, 2 reads
    cast_with_scale               given                  3, 1 read    3, 1 read      4, 1 read
    cast_with_persistent_scale    given where known      3, 1 read    3, 1 read      4, 1 read
    cast_blockwise (*)            block amaxes           3, 1 read    3, 1 read      4, 1 read

(*) In triton_cast_blocks.py; 1 x n in odd sizes moves 6 bytes for both, in 2 reads.

An unknown persistent scale costs one more read, and so do rows of more than WIDEST_ROW columns. The first of two
reads is an amax pass (triton_amax.py). Three kernels cast. `_cast_tensorwise` has one scale, dynamic or persistent.
`_cast_rowwise` has a scale per row and per column, or given scales. `_cast_whole_rows` holds whole rows in registers
and so computes a scale per row in one read. Casts start at the last tile, which the amax pass left in the cache.
triton_blocks.py describes grids, tiles and masks.

A function returns None for a matrix or a rule that its kernels do not support. No call waits for the device. A CUDA
graph can capture a call after a first call has compiled the kernels. Results are maxima and sums of integers (exact up
to 2^24), so they do not depend on the order of programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.operands import FlatOperands, Operand, Operands, pair_codes, select_directions, unflatten_operands
from quaver.kernels.triton_amax import compute_amax, compute_amax_by_dim, compute_amax_unless_scale_known, group_amax
from quaver.kernels.triton_blocks import (
    CastTarget,
    CodePair,
    KernelTile,
    apply_scale,
    choose_tile,
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
    make_column_range,
    make_mask,
    replace_inf_by_nan,
    store_column_codes,
    store_row_codes,
    store_scales,
    supports,
    to_float8,
    view_bits,
    widen,
)
from quaver.kernels.triton_cast_blocks import cast_blockwise
from quaver.kernels.triton_copy import to_column_major
from quaver.recipes.scale_layout import ROWWISE

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs lacks it
    triton = None

__all__ = [
    "compute_amax",
    "cast_blockwise",
    "cast_rowwise",
    "cast_tensorwise",
    "cast_with_persistent_scale",
    "cast_with_scale",
    "to_column_major",
    "group_amax",
    "supports",
]

ScaleBuffers = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Amaxes with buffers for the quant_scales and dequant_scales; or given quant_scales, None, None."""

WIDEST_ROW = 32768
"""The most columns of a row that `_cast_whole_rows` holds in registers."""


def cast_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str = ""
) -> Operands | None:
    """Run `quaver.recipes.scaling.dynamic_cast` on `hp` [R, C] with one scale, float32 ()."""
    if not supports(hp, float8_dtype, rule):
        return None
    cast = make_cast_target(float8_dtype, power_of_2, rule)
    row_codes, quant, dequant, column_codes, _ = _cast_with_one_scale(hp, float8_dtype, row, column, cast, None)
    return pair_codes(row_codes, column_codes, quant, dequant)


def cast_with_persistent_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, quant_scale: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor] | None:
    """Run `quaver.recipes.scaling.cast_with_persistent_scale` on `hp` [R, C].

    Args:
        quant_scale: float32 ().
    Returns:
        Row codes, quant_scale and dequant_scale, float32 (), and column codes; None for codes that were not requested.
        And float32 [2]: the amax of hp, and the number of saturated elements.
    """
    if not supports(hp, float8_dtype):
        return None
    return _cast_with_one_scale(hp, float8_dtype, row, column, make_cast_target(float8_dtype, power_of_2), quant_scale)


def _cast_with_one_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, cast: CastTarget, quant_scale: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor]:
    """Run `cast_with_persistent_scale`, or with None for quant_scale a dynamic cast, which counts no saturation."""
    recorded_amax = compute_amax_unless_scale_known(hp, quant_scale)
    row_codes, column_codes = empty_codes(hp, float8_dtype, row, column)
    quant, dequant = (hp.new_empty((), dtype=torch.float32) for _ in range(2))
    tile = choose_tile(hp, column_codes=column)
    tensors = (row_codes, column_codes, quant_scale, recorded_amax, quant, dequant)
    launch(_cast_tensorwise, hp, tile, *tensors, CAST=cast)
    return row_codes, quant, dequant, column_codes, recorded_amax


def cast_rowwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str = ""
) -> Operands | None:
    """Run `quaver.recipes.scaling.dynamic_cast` on `hp` [R, C] along dim 1 and dim 0, with scales [R, 1] and [1, C]."""
    if not supports(hp, float8_dtype, rule):
        return None
    cast = make_cast_target(float8_dtype, power_of_2, rule)
    if not column and hp.shape[1] <= WIDEST_ROW:
        codes = torch.empty_like(hp, dtype=float8_dtype)
        quant, dequant = (hp.new_empty(hp.shape[0], 1, dtype=torch.float32) for _ in range(2))
        launch(_cast_whole_rows, hp, choose_whole_row_tile(hp.shape[1]), codes, quant, dequant, CAST=cast)
        return select_directions(Operand(codes, dequant, ROWWISE, quant), row, column)
    row_amax, column_amax = compute_amax_by_dim(hp, rows=row, columns=column)
    row_scales, column_scales = _empty_scales(row_amax), _empty_scales(column_amax)
    row_codes, column_codes = _cast_by_dim(hp, float8_dtype, row_scales, column_scales, cast)
    flat = FlatOperands(row_codes, *row_scales[1:], column_codes, *column_scales[1:])
    return unflatten_operands(flat, row, column, ROWWISE)


def cast_with_scale(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    rule: str = "",
) -> CodePair | None:
    """Run `quaver.recipes.scaling.cast_to_float8` on `hp` [R, C].

    Args:
        row_scale: float32 () or [R, 1], the `factor` of row codes; None for no row codes.
        column_scale: float32 () or [1, C], the `factor` of column codes; None for no column codes.
    Returns:
        Row codes, column codes.
    """
    if not supports(hp, float8_dtype, rule):
        return None
    row_scales = (None if row_scale is None else row_scale.expand(hp.shape[0], 1), None, None)
    column_scales = (None if column_scale is None else column_scale.expand(1, hp.shape[1]), None, None)
    return _cast_by_dim(hp, float8_dtype, row_scales, column_scales, make_cast_target(float8_dtype, rule=rule))


def _cast_by_dim(
    hp: Tensor, float8_dtype: torch.dtype, row_scales: ScaleBuffers, column_scales: ScaleBuffers, cast: CastTarget
) -> CodePair:
    row_scale, column_scale = row_scales[0], column_scales[0]
    codes = empty_codes(hp, float8_dtype, row_scale is not None, column_scale is not None)
    strides = (0 if row_scale is None else row_scale.stride(0), 0 if column_scale is None else column_scale.stride(1))
    tile = choose_tile(hp, column_codes=column_scale is not None)
    launch(_cast_rowwise, hp, tile, *codes, *row_scales, *column_scales, *strides, CAST=cast)
    return codes


def choose_whole_row_tile(width: int) -> KernelTile:
    """Return a tile of 4096 elements, or of one row if a row is wider, with 32 elements per thread."""
    columns = max(triton.next_power_of_2(width), 16)
    rows = max(4096 // columns, 1)
    return KernelTile(rows, columns, warps=rows * columns // (32 * 32))


def _empty_scales(amax: Tensor | None) -> ScaleBuffers:
    return (None, None, None) if amax is None else (amax, torch.empty_like(amax), torch.empty_like(amax))


@jit
def _cast_tensorwise(
    hp_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    recorded_amax_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
) -> None:
    """Cast with one scale. With a persistent scale, also update `recorded_amax`: the amax and the saturated count."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    hp, r, c = load_tile(hp_ptr, tile, rows, columns, TILE)
    recorded = tl.load(view_bits(recorded_amax_ptr))
    quant = 0.0 if quant_scale_ptr is None else tl.load(quant_scale_ptr)
    dequant = quant
    if not (quant > 0):
        quant, dequant = compute_scales(recorded.to(tl.float32, bitcast=True), CAST)
    if tile == 0:
        store_scales(quant_ptr, dequant_ptr, quant, dequant, None, CAST)
    if quant_scale_ptr is None:
        product = apply_scale(widen(hp), quant, dequant, CAST)
    else:
        bits = compute_amax_bits(hp)
        tl.atomic_max(view_bits(recorded_amax_ptr), bits, mask=bits > recorded, sem="relaxed")
        hp = hide_from_cse(hp)
        # Rounding keeps products in the order of the factors: if the largest does not saturate, none does.
        if not (bits.to(tl.float32, bitcast=True) * quant <= CAST.saturates_above):
            count = tl.sum((tl.abs(replace_inf_by_nan(widen(hp)) * quant) > CAST.saturates_above).to(tl.int32))
            tl.atomic_add(recorded_amax_ptr + 1, count.to(tl.float32), mask=count > 0, sem="relaxed")
        product = replace_inf_by_nan(widen(hide_from_cse(hp))) * quant
    codes = to_float8(product, CAST)
    if row_codes_ptr is not None:
        store_row_codes(row_codes_ptr, codes, r, c, rows, columns)
    if column_codes_ptr is not None:
        store_column_codes(column_codes_ptr, codes, tile, c, rows, columns, TILE)


@jit
def _cast_rowwise(
    hp_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    row_quant_ptr: tl.tensor,
    row_dequant_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    column_quant_ptr: tl.tensor,
    column_dequant_ptr: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
) -> None:
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    hp, r, c = load_tile_in_float32(hp_ptr, tile, rows, columns, TILE)
    tiles_across = tl.cdiv(columns, TILE.columns)
    if row_quant_ptr is None and column_quant_ptr is None:
        hp = replace_inf_by_nan(hp)
    if row_codes_ptr is not None:
        is_first = tile % tiles_across == 0
        quant, dequant = _load_or_compute_scales(
            row_scales_ptr, row_quant_ptr, row_dequant_ptr, r, rows, row_stride, is_first, CAST
        )
        codes = to_float8(apply_scale(hp, quant[:, None], dequant[:, None], CAST), CAST)
        store_row_codes(row_codes_ptr, codes, r, c, rows, columns)
    if column_codes_ptr is not None:
        is_first = tile < tiles_across
        quant, dequant = _load_or_compute_scales(
            column_scales_ptr, column_quant_ptr, column_dequant_ptr, c, columns, column_stride, is_first, CAST
        )
        codes = to_float8(apply_scale(hp, quant[None, :], dequant[None, :], CAST), CAST)
        store_column_codes(column_codes_ptr, codes, tile, c, rows, columns, TILE)


@jit
def _load_or_compute_scales(
    scales_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    i: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    stores: tl.tensor,
    CAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Compute and store the scales of rows or columns i; without quant_ptr, return the given scales twice."""
    quant = tl.load(scales_ptr + i * stride, mask=i < end, other=1.0)
    dequant = quant
    if quant_ptr is not None:
        quant, dequant = compute_scales(quant, CAST)
        if stores:
            store_scales(quant_ptr + i, dequant_ptr + i, quant, dequant, i < end, CAST)
    return quant, dequant


@jit
def _cast_whole_rows(
    hp_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
) -> None:
    r = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    c = make_column_range(hp_ptr, TILE.columns)  # not by load_tile: 64-bit columns spill
    positions, mask = r[:, None] * columns + c[None, :], make_mask(r, rows, c, columns)
    hp = widen(tl.load(hp_ptr + positions, mask=mask, other=0.0))
    amax = tl.max(get_magnitude_bits(hp), 1).to(tl.float32, bitcast=True)
    quant, dequant = compute_scales(amax, CAST)
    store_scales(quant_ptr + r, dequant_ptr + r, quant, dequant, r < rows, CAST)
    codes = to_float8(apply_scale(hp, quant[:, None], dequant[:, None], CAST), CAST)
    tl.store(codes_ptr + positions, codes, mask=mask)
