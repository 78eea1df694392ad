"""One scale a row, one scale a column: casts of a matrix along its axes, on an NVIDIA GPU, in Triton.

    row codes      [R, C]   = RNE8(clamp(RN32(float32(hp[r, c]) * quant[r]), -max, max))
    column codes   [C, R]   = the same with quant[c]; handed out as its transpose: shape [R, C], strides (1, R)
    quant                   = RN32(max / amax of the row or column), capped, optionally rounded down to 2^k; or given
    dequant                 = RN32(1 / quant)

the oracle's bits (scaling.py, dims 1 and 0), for the two matmuls that read the matrix along one axis each.

Reads: one for given scales. Two for dynamic ones, of which the first finds the amaxes of all rows and columns that are
wanted (triton_reduce.py), and the second casts. Rows alone that fit on the chip need just one (triton_rows.py).

Grid, tile, mask, positions, and column sums: those of triton_tiles.py.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels.triton_blocks import TRITON_FLOAT8, jit, own_dequant_scale, own_quant_scale, to_float8
from quaver.kernels.triton_tiles import (
    empty_codes,
    empty_partial_sums,
    load_2d,
    store_columns,
    store_rows,
    store_sums,
    tile_for,
    tile_positions,
)
from quaver.scaling import EPS

with contextlib.suppress(ImportError):  # PyTorch for CPUs comes without it
    import triton.language as tl


class CastAxes(NamedTuple):
    """What came of one read of a matrix [R, C]. Quant and dequant scales are None where they were given."""

    row_codes: Tensor | None
    """float8 [R, C]."""
    row_quant: Tensor | None
    row_dequant: Tensor | None
    """float32 [R, 1]."""
    column_codes: Tensor | None
    """float8 [R, C] with strides (1, R)."""
    column_quant: Tensor | None
    column_dequant: Tensor | None
    """float32 [1, C]."""
    partial_sums: Tensor | None
    """float32 [rows of tiles, C]."""


def cast_axes(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    row_scales: Tensor | None,
    column_scales: Tensor | None,
    given: bool,
    power_of_2: bool = False,
    sums: bool = False,
) -> CastAxes:
    """Cast `hp` [R, C], which is not empty and `triton_blocks.takes` accepts, along one axis or both in one read.

    Args:
        row_scales: float32 [R, 1]; None where no row codes are wanted. Amaxes to make scales of, or quant_scales.
        column_scales: float32 [1, C], likewise.
        given: whether these are quant_scales. Such may also be () or [1, 1], one for the whole matrix.
        power_of_2: round scales that are made down to powers of two.
        sums: add up columns too.
    """
    fmt = format_of(float8_dtype)
    tile = tile_for(hp, columns=column_scales is not None)
    row_codes, column_codes = empty_codes(
        hp, float8_dtype, rows=row_scales is not None, columns=column_scales is not None
    )
    row_quant, row_dequant = _empty_pair(row_scales, given)
    column_quant, column_dequant = _empty_pair(column_scales, given)
    partial_sums = empty_partial_sums(hp, tile, sums)
    with torch.cuda.device_of(hp):
        _cast_axes[tile.grid(hp)](
            hp,
            row_scales,
            column_scales,
            row_codes,
            column_codes,
            row_quant,
            row_dequant,
            column_quant,
            column_dequant,
            partial_sums,
            *hp.shape,
            MAX=fmt.max,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            GIVEN=given,
            ONE_FOR_ROWS=row_scales is not None and row_scales.numel() == 1,
            ONE_FOR_COLUMNS=column_scales is not None and column_scales.numel() == 1,
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            **tile.constants(),
        )
    columns = None if column_codes is None else column_codes.t()
    return CastAxes(row_codes, row_quant, row_dequant, columns, column_quant, column_dequant, partial_sums)


def _empty_pair(scales: Tensor | None, given: bool) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scales is None or given else (torch.empty_like(scales), torch.empty_like(scales))


@jit
def _cast_axes(
    hp_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    row_quant_ptr: tl.tensor,
    row_dequant_ptr: tl.tensor,
    column_quant_ptr: tl.tensor,
    column_dequant_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    GIVEN: tl.constexpr,
    ONE_FOR_ROWS: tl.constexpr,
    ONE_FOR_COLUMNS: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    first_row, first_column, r, c = tile_positions(hp_ptr, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)
    hp = load_2d(hp_ptr, r, c, rows, columns, INTERPRETED)
    if sums_ptr is not None:
        store_sums(sums_ptr, hp, first_row // TILE_ROWS, c, columns)
    if row_codes_ptr is not None:
        quant = tl.load(row_scales_ptr + (r * 0 if ONE_FOR_ROWS else r), mask=r < rows, other=1.0)
        if not GIVEN:
            quant = own_quant_scale(quant, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
            _store_scales_once(row_quant_ptr, row_dequant_ptr, quant, r, rows, first_column)
        store_rows(row_codes_ptr, to_float8(hp * quant[:, None], FLOAT8, INTERPRETED), r, c, rows, columns)
    if column_codes_ptr is not None:
        quant = tl.load(column_scales_ptr + (c * 0 if ONE_FOR_COLUMNS else c), mask=c < columns, other=1.0)
        if not GIVEN:
            quant = own_quant_scale(quant, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
            _store_scales_once(column_quant_ptr, column_dequant_ptr, quant, c, columns, first_row)
        codes = to_float8(hp * quant[None, :], FLOAT8, INTERPRETED)
        store_columns(column_codes_ptr, codes, first_row, c, rows, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)


@jit
def _store_scales_once(
    quant_ptr: tl.tensor, dequant_ptr: tl.tensor, quant: tl.tensor, i: tl.tensor, end: tl.tensor, across: tl.tensor
) -> None:
    """The scales of rows or columns `i`, written by the tile that is at 0 across them."""
    if across == 0:
        tl.store(quant_ptr + i, quant, mask=i < end)
        tl.store(dequant_ptr + i, own_dequant_scale(quant), mask=i < end)
