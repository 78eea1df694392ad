"""One scale, one read of a matrix, its float8 codes in one layout or in both, on an NVIDIA GPU, in Triton.

    row codes      [R, C] contiguous along C
    column codes   [C, R] contiguous along R, handed out as its transpose: shape [R, C], strides (1, R)

A matmul reads both operands along the dim that it contracts, so an operand of two matmuls is wanted in both layouts.
The scale is that of the amax that an earlier pass has left on the device; or kept, and then what the cast sees is
recorded (triton_cast.py says how). For given scales see triton_axes.py.

Grid and tile: one program for each tile, in the order of rows, the last one first: what an earlier pass over the matrix
read last is still in the cache. A tile is read and its row codes are written along rows, 16 bytes and 8 codes at a
time. Column sums leave as one row of float32 partial sums for each row of tiles (triton_reduce.py adds them up), so
they are the same in every run.
Mask: what lies outside the matrix is read as 0, and not written. Where R and C are multiples of 16, loads and stores
stay whole; elsewhere they are narrow, and tiles small.
Positions are 64-bit.

[Note: turning a tile] Column codes change threads through shared memory, and are then written 16 at a time. A thread
that held single codes of a column would put them there one by one. So rows are dealt out such that a thread's loads,
one below the other, are of ROWS_OF_THREAD adjoining rows: it then holds short columns, and puts down 8 codes at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels.triton_blocks import (
    INTERPRETED,
    TRITON_FLOAT8,
    as_bits,
    dealt_offsets,
    jit,
    observe,
    quant_scale_of_matrix,
    scaled_by,
    store_scale_once,
    to_float8,
    widen,
)
from quaver.scaling import EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None


class Tile(NamedTuple):
    """How much of a matrix one program takes, and how."""

    rows: int
    columns: int
    rows_of_thread: int
    """rows * columns / (threads * elements of a load): see [Note: turning a tile]."""
    warps: int

    def constants(self) -> dict[str, Any]:
        """What kernels are told of it."""
        return {
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "ROWS_OF_THREAD": self.rows_of_thread,
            "INTERPRETED": INTERPRETED,
            "num_warps": self.warps,
        }

    def grid(self, hp: Tensor) -> tuple[int]:
        """One program for each tile of `hp`."""
        return (triton.cdiv(hp.shape[0], self.rows) * triton.cdiv(hp.shape[1], self.columns),)


def tile_for(hp: Tensor, *, columns: bool) -> Tile:
    """The tile for `hp` [R, C], with or without column codes: eight loads of 16 bytes for each thread."""
    height, width = hp.shape
    if width % 16 or hp.data_ptr() % 16 or (columns and height % 16):
        return Tile(64, 32, 16, 4)
    return Tile(128, 64, 8, 2 * hp.element_size())


def empty_codes(
    hp: Tensor, float8_dtype: torch.dtype, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What row codes and column codes of `hp` [R, C] are written to, where wanted: float8 [R, C] and [C, R]."""
    height, width = hp.shape
    return (
        hp.new_empty(height, width, dtype=float8_dtype) if rows else None,
        hp.new_empty(width, height, dtype=float8_dtype) if columns else None,
    )


def empty_partial_sums(hp: Tensor, tile: Tile, wanted: bool) -> Tensor | None:
    """What column sums of `hp` [R, C] are written to: float32 [rows of tiles, C]."""
    return hp.new_empty(triton.cdiv(hp.shape[0], tile.rows), hp.shape[1], dtype=torch.float32) if wanted else None


class CastTiles(NamedTuple):
    """What came of one read of a matrix [R, C] with one scale."""

    row_codes: Tensor | None
    """float8 [R, C]."""
    column_codes: Tensor | None
    """float8 [R, C] with strides (1, R)."""
    quant_scale: Tensor
    dequant_scale: Tensor
    """float32 ()."""
    partial_sums: Tensor | None
    """float32 [rows of tiles, C]."""


def cast_tiles(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    quant_scale: Tensor | None,
    observed: Tensor,
    power_of_2: bool = False,
    sums: bool = False,
) -> CastTiles:
    """Cast `hp` [R, C], which is not empty and `triton_blocks.takes` accepts, with one scale in one read.

    Args:
        rows, columns: which layouts are wanted; at least one.
        quant_scale: float32 (), kept: what is not above 0 is not known. None for the scale of hp's amax.
        observed: float32 [2], as `triton_cast.amax_unless_known` gives it: the amax to make the scale of, where it is
            needed. With a kept scale, what the cast sees is recorded here.
        power_of_2: round a scale that is made down to a power of two.
        sums: add up columns too.
    """
    fmt = format_of(float8_dtype)
    tile = tile_for(hp, columns=columns)
    row_codes, column_codes = empty_codes(hp, float8_dtype, rows=rows, columns=columns)
    quant, dequant = hp.new_empty((), dtype=torch.float32), hp.new_empty((), dtype=torch.float32)
    partial_sums = empty_partial_sums(hp, tile, sums)
    with torch.cuda.device_of(hp):
        _cast_tiles[tile.grid(hp)](
            hp,
            quant_scale,
            observed,
            row_codes,
            column_codes,
            quant,
            dequant,
            partial_sums,
            *hp.shape,
            MAX=fmt.max,
            SATURATES_ABOVE=fmt.saturates_above,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            SCALE="amax" if quant_scale is None else "kept",
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            **tile.constants(),
        )
    return CastTiles(row_codes, None if column_codes is None else column_codes.t(), quant, dequant, partial_sums)


@jit
def _cast_tiles(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    MAX: tl.constexpr,
    SATURATES_ABOVE: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SCALE: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    first_row, _, r, c = tile_positions(hp_ptr, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)
    hp = load_2d(hp_ptr, r, c, rows, columns, INTERPRETED)
    if sums_ptr is not None:
        store_sums(sums_ptr, hp, first_row // TILE_ROWS, c, columns)
    recorded = tl.load(as_bits(observed_ptr))
    quant = quant_scale_of_matrix(quant_scale_ptr, recorded, MAX, LARGEST_QUANT_SCALE, POWER_OF_2, SCALE)
    store_scale_once(quant_ptr, dequant_ptr, quant, tl.program_id(0))
    scaled = scaled_by(hp, quant, SCALE)
    if SCALE == "kept":  # before the codes: later it would hold 40 registers more
        observe(observed_ptr, recorded, hp, scaled, quant, SATURATES_ABOVE)
    codes = to_float8(scaled, FLOAT8, INTERPRETED)
    if row_codes_ptr is not None:
        store_rows(row_codes_ptr, codes, r, c, rows, columns)
    if column_codes_ptr is not None:
        store_columns(column_codes_ptr, codes, first_row, c, rows, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)


# What kernels that work on tiles share.


@jit
def tile_positions(
    hp_ptr: tl.tensor,
    columns: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """This program's tile: first row, first column, rows as [Note: turning a tile] deals them, columns. int64."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    across = tl.cdiv(columns, TILE_COLUMNS)
    first_row = tile // across * TILE_ROWS
    order = tl.arange(0, TILE_ROWS)
    STRIPES: tl.constexpr = TILE_ROWS // ROWS_OF_THREAD
    r = first_row + (order % STRIPES) * ROWS_OF_THREAD + order // STRIPES
    first_column = tile % across * TILE_COLUMNS
    return first_row, first_column, r, first_column + dealt_offsets(hp_ptr, TILE_COLUMNS)


@jit
def load_2d(
    hp_ptr: tl.tensor, r: tl.tensor, c: tl.tensor, rows: tl.tensor, columns: tl.tensor, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """float32: hp [rows, columns] at rows r and columns c, 0 outside."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    return widen(tl.load(hp_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0), INTERPRETED)


@jit
def store_rows(
    codes_ptr: tl.tensor, codes: tl.tensor, r: tl.tensor, c: tl.tensor, rows: tl.tensor, columns: tl.tensor
) -> None:
    """Write a tile's codes to [rows, columns]."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(codes_ptr + r[:, None] * columns + c[None, :], codes, mask=inside)


@jit
def store_columns(
    codes_ptr: tl.tensor,
    codes: tl.tensor,
    first_row: tl.tensor,
    c: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
) -> None:
    """Write a tile's codes to [columns, rows], its rows in their order again."""
    STRIPES: tl.constexpr = TILE_ROWS // ROWS_OF_THREAD
    turned = tl.permute(tl.reshape(codes, [ROWS_OF_THREAD, STRIPES, TILE_COLUMNS]), [2, 1, 0])
    r = first_row + tl.arange(0, TILE_ROWS)
    inside = (c < columns)[:, None] & (r < rows)[None, :]
    at = c[:, None] * rows + r[None, :]
    tl.store(codes_ptr + at, tl.reshape(turned, [TILE_COLUMNS, TILE_ROWS]), mask=inside)


@jit
def store_sums(sums_ptr: tl.tensor, hp: tl.tensor, row: tl.tensor, c: tl.tensor, columns: tl.tensor) -> None:
    """Write a tile's column sums to a row of [rows of tiles, columns]."""
    tl.store(sums_ptr + row * columns + c, tl.sum(hp, 0), mask=c < columns)
