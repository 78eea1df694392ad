"""What a producer computes, cast to float8 where it is computed, on an NVIDIA GPU, in Triton.

    swiglu      RNh(RNh(gate / (1 + exp(-gate))) * up)              RNh: to the dtype of gate and up
    rms_norm    RNp(RNh((hidden * inverse_rms[row]) * weight))      RNh: to hidden's dtype, RNp: to hp_dtype

in float32 between the roundings, which are those of PyTorch's expressions. The produced matrix [R, C] is never written:
what reads it computes it again, from as many bytes. What follows is that of triton_tiles.py and triton_axes.py, which
cast a matrix that exists: the oracle's scales and codes (scaling.py), the tiles, their order, and how they are turned.

Accuracy: exp, division and 1/sqrt are the hardware's, a few units in float32's last place from PyTorch's. RNh hides
nearly all of that; where it does not, a produced number is the next one of its dtype, and its code is, rarely, the next
code. Infinities, NaNs and zeros are PyTorch's; nothing is flushed to zero.

Grid, tile, mask, positions: those of triton_tiles.py; what a producer computes with takes registers, so a tile has
twice the warps.
Row codes of SwiGLU alone, with one scale, are cast flat: every tile is a stretch of the only row.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels.triton_blocks import (
    TRITON_FLOAT8,
    jit,
    observe,
    own_dequant_scale,
    own_quant_scale,
    quant_scale_of_matrix,
    scaled_by,
    store_scale_once,
    to_float8,
    widen,
)
from quaver.kernels.triton_tiles import (
    Tile,
    empty_codes,
    load_2d,
    store_columns,
    store_rows,
    tile_for,
    tile_positions,
)
from quaver.scaling import EPS

TRITON_HP = {}
with contextlib.suppress(ImportError):  # PyTorch for CPUs comes without it
    import triton.language as tl

    TRITON_HP = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Made = tuple[Tensor | None, ...]

FLAT_BYTES = 8192
"""Of gate in a tile of a flat cast: four loads of 16 bytes for each thread, and as many of up."""
FLAT_WARPS = 4


class Produced(NamedTuple):
    """A matrix [R, C] that is computed where it is read."""

    first: Tensor
    """gate or hidden: [R, C]."""
    second: Tensor
    """up: [R, C]; or weight: [C]."""
    inverse_rms: Tensor | None
    """float32 [R]; None for SwiGLU."""
    hp_dtype: torch.dtype
    """What the result is rounded to."""

    def tile(self, *, columns: bool) -> Tile:
        """The tile for a cast, with or without column codes."""
        tile = tile_for(self.first, columns=columns)
        if self.inverse_rms is None:
            tile = min(tile, tile_for(self.second, columns=columns))  # the smaller where loads of either are narrow
        return tile._replace(rows_of_thread=tile.rows_of_thread // 2, warps=2 * tile.warps)

    def flat(self) -> Produced:
        """SwiGLU's as one row."""
        return self._replace(first=self.first.view(1, -1), second=self.second.view(1, -1))


def cast_tiles(
    produced: Produced,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    quant_scale: Tensor | None,
    observed: Tensor,
    power_of_2: bool,
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale: one scale, one read; `triton_tiles.cast_tiles` says more."""
    row_codes, column_codes = empty_codes(produced.first, float8_dtype, rows=rows, columns=columns)
    tile = produced.tile(columns=columns)
    if produced.inverse_rms is None and not columns:
        tile, produced = Tile(1, FLAT_BYTES // produced.first.element_size(), 1, FLAT_WARPS), produced.flat()
    first, fmt = produced.first, format_of(float8_dtype)
    quant, dequant = first.new_empty((), dtype=torch.float32), first.new_empty((), dtype=torch.float32)
    with torch.cuda.device_of(first):
        _cast_tiles[tile.grid(first)](
            first,
            produced.second,
            produced.inverse_rms,
            quant_scale,
            observed,
            row_codes,
            column_codes,
            quant,
            dequant,
            *first.shape,
            MAX=fmt.max,
            SATURATES_ABOVE=fmt.saturates_above,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            SCALE="amax" if quant_scale is None else "kept",
            HP=TRITON_HP[produced.hp_dtype],
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            **tile.constants(),
        )
    return row_codes, None if column_codes is None else column_codes.t(), quant, dequant


def cast_axes(
    produced: Produced,
    float8_dtype: torch.dtype,
    *,
    row_amax: Tensor | None,
    column_amax: Tensor | None,
    power_of_2: bool,
) -> Made:
    """Codes, quant_scale and dequant_scale of rows, then of columns, in one read; None for an axis without amaxes.

    Args:
        row_amax: float32 [R, 1].
        column_amax: float32 [1, C].
    """
    rows, columns = row_amax is not None, column_amax is not None
    first, fmt, tile = produced.first, format_of(float8_dtype), produced.tile(columns=columns)
    row_codes, column_codes = empty_codes(first, float8_dtype, rows=rows, columns=columns)
    row_scales = (None, None) if row_amax is None else (torch.empty_like(row_amax), torch.empty_like(row_amax))
    column_scales = (
        (None, None) if column_amax is None else (torch.empty_like(column_amax), torch.empty_like(column_amax))
    )
    with torch.cuda.device_of(first):
        _cast_axes[tile.grid(first)](
            first,
            produced.second,
            produced.inverse_rms,
            row_amax,
            column_amax,
            row_codes,
            column_codes,
            *row_scales,
            *column_scales,
            *first.shape,
            MAX=fmt.max,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            HP=TRITON_HP[produced.hp_dtype],
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            **tile.constants(),
        )
    return row_codes, *row_scales, None if column_codes is None else column_codes.t(), *column_scales


def load_ahead(width: int) -> bool:
    """Whether a thread's registers hold, beside 16 elements of rows of this width, the next 16 that are under way.

    Not where 32 warps share them, nor where loads are narrow and positions take as many.
    """
    return width <= 8192 and width % 16 == 0


@jit
def _cast_tiles(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    MAX: tl.constexpr,
    SATURATES_ABOVE: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SCALE: tl.constexpr,
    HP: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    first_row, _, r, c = tile_positions(first_ptr, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)
    hp = _produced(first_ptr, second_ptr, inverse_rms_ptr, r, c, rows, columns, HP, INTERPRETED)
    recorded = tl.load(observed_ptr.to(tl.pointer_type(tl.int32), bitcast=True))
    quant = quant_scale_of_matrix(quant_scale_ptr, recorded, MAX, LARGEST_QUANT_SCALE, POWER_OF_2, SCALE)
    store_scale_once(quant_ptr, dequant_ptr, quant, tl.program_id(0))
    scaled = scaled_by(hp, quant, SCALE)
    if SCALE == "kept":  # before the codes: later it would hold more registers
        observe(observed_ptr, recorded, hp, scaled, quant, SATURATES_ABOVE)
    codes = to_float8(scaled, FLOAT8, INTERPRETED)
    if row_codes_ptr is not None:
        store_rows(row_codes_ptr, codes, r, c, rows, columns)
    if column_codes_ptr is not None:
        store_columns(column_codes_ptr, codes, first_row, c, rows, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)


@jit
def _cast_axes(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    row_quant_ptr: tl.tensor,
    row_dequant_ptr: tl.tensor,
    column_quant_ptr: tl.tensor,
    column_dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HP: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROWS_OF_THREAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    first_row, first_column, r, c = tile_positions(first_ptr, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)
    hp = _produced(first_ptr, second_ptr, inverse_rms_ptr, r, c, rows, columns, HP, INTERPRETED)
    if row_codes_ptr is not None:
        amax = tl.load(row_amax_ptr + r, mask=r < rows, other=1.0)
        quant = own_quant_scale(amax, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
        if first_column == 0:
            store_scales(row_quant_ptr, row_dequant_ptr, quant, r, rows)
        store_rows(row_codes_ptr, to_float8(hp * quant[:, None], FLOAT8, INTERPRETED), r, c, rows, columns)
    if column_codes_ptr is not None:
        amax = tl.load(column_amax_ptr + c, mask=c < columns, other=1.0)
        quant = own_quant_scale(amax, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
        if first_row == 0:
            store_scales(column_quant_ptr, column_dequant_ptr, quant, c, columns)
        codes = to_float8(hp * quant[None, :], FLOAT8, INTERPRETED)
        store_columns(column_codes_ptr, codes, first_row, c, rows, columns, TILE_ROWS, TILE_COLUMNS, ROWS_OF_THREAD)


# What a producer computes, for every kernel that reads it.


@jit
def _produced(
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    r: tl.tensor,
    c: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    HP: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """float32: the produced matrix at rows r and columns c, 0 outside."""
    first = load_2d(first_ptr, r, c, rows, columns, INTERPRETED)
    if inverse_rms_ptr is None:
        hp = swiglu(first, load_2d(second_ptr, r, c, rows, columns, INTERPRETED), HP, INTERPRETED)
    else:
        inverse_rms = tl.load(inverse_rms_ptr + r, mask=r < rows, other=0.0)
        weight = load_weight(second_ptr, first_ptr, c, columns, INTERPRETED)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        hp = rms_norm(first, inverse_rms, weight, inside, first_ptr.dtype.element_ty, HP, INTERPRETED)
    return hp


@jit
def swiglu(gate: tl.tensor, up: tl.tensor, HP: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """float32, of float32: see the top of the file."""
    return rounded(rounded(gate / (1.0 + tl.exp(-gate)), HP, INTERPRETED) * up, HP, INTERPRETED)


@jit
def rms_norm(
    hidden: tl.tensor,
    inverse_rms: tl.tensor,
    weight: tl.tensor,
    inside: tl.tensor,
    HIDDEN: tl.constexpr,
    HP: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """float32 [rows, columns], of float32 [rows, columns], [rows] and [columns]: see the top of the file.

    0 outside, where an infinite inverse_rms or weight would make a NaN of a 0.
    """
    normed = rounded(hidden * inverse_rms[:, None] * weight[None, :], HIDDEN, INTERPRETED)
    if HIDDEN != HP:
        normed = rounded(normed, HP, INTERPRETED)
    return tl.where(inside, normed, 0.0)


@jit
def load_weight(
    weight_ptr: tl.tensor, hidden_ptr: tl.tensor, c: tl.tensor, columns: tl.tensor, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """float32: the weights of columns c as hidden's dtype has them, 0 outside."""
    weight = widen(tl.load(weight_ptr + c, mask=c < columns, other=0.0), INTERPRETED)
    return rounded(weight, hidden_ptr.dtype.element_ty, INTERPRETED)


@jit
def load_rows(
    hp_ptr: tl.tensor,
    row: tl.tensor,
    in_tile: tl.tensor,
    down: tl.tensor,
    end: tl.tensor,
    across: tl.tensor,
    columns: tl.tensor,
) -> tl.tensor:
    """hp's numbers at the positions of a tile that begins with `row`, 0 from row `end` on and behind the columns."""
    return tl.load(hp_ptr + row * columns + in_tile, mask=(row + down < end)[:, None] & across, other=0.0)


@jit
def store_scales(quant_ptr: tl.tensor, dequant_ptr: tl.tensor, quant: tl.tensor, i: tl.tensor, end: tl.tensor) -> None:
    """The scales of rows or columns `i` that their own amaxes gave, with their dequant_scales."""
    tl.store(quant_ptr + i, quant, mask=i < end)
    tl.store(dequant_ptr + i, own_dequant_scale(quant), mask=i < end)


@jit
def rounded(wide: tl.tensor, HP: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """A float32 number as HP has it, in float32 again."""
    return widen(narrowed(wide, HP, INTERPRETED), INTERPRETED)


@jit
def narrowed(wide: tl.tensor, HP: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """A float32 number in HP, rounded to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == HP:
        return _round_to_bfloat16(wide)
    return wide.to(HP)


@jit
def _round_to_bfloat16(wide: tl.tensor) -> tl.tensor:
    """For the interpreter, whose own conversion does not round ties to even; see the end of triton_blocks.py."""
    bits = wide.to(tl.int32, bitcast=True)
    upper = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where(wide == wide, upper, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
