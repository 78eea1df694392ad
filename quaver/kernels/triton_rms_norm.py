"""RMSNorm, cast to float8 as it is computed, on an NVIDIA GPU, in Triton.

    inverse_rms[r]  = 1 / sqrt(mean(hidden[r]^2) + eps)
    normed          = RNp(RNh(hidden * inverse_rms * weight))       triton_produced.py says the roundings

in float32 between the roundings. Reads of hidden:

                                scales of                   row codes alone             with column codes
    cast_layouts                normed's amax               2: statistics; the cast     the same
    cast_with_persistent_scale        an earlier amax             1, or 2 where not known     2: statistics; the cast
    cast_axes                   row and column amaxes       1                           2: statistics; the cast

Grid and tile: a tile is a few whole rows, which wait on the chip for their mean square; `fits` says how wide they may
be. `_cast_rows` has one tile a program. `_row_statistics` has STATISTICS_PROGRAMS at most, which stride over the tiles
with the next one under way, the weight in registers, and, where they are wanted, the amaxes of columns there too. Casts
that write column codes, or need an amax first, are triton_produced.py's.
Mask: what lies outside is read as 0, and not written. Where D is a multiple of 16, loads and stores stay whole.
Positions are 64-bit. Nothing waits for the device, and a CUDA graph can capture a call once a first one has compiled
the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels import triton_rows
from quaver.kernels.triton_blocks import (
    INTERPRETED,
    TRITON_FLOAT8,
    as_bits,
    dealt_offsets,
    jit,
    magnitude_bits,
    observe,
    own_quant_scale,
    quant_scale_of_matrix,
    scaled_by,
    store_scale_once,
    to_float8,
    widen,
)
from quaver.kernels.triton_produced import (
    TRITON_HP,
    Made,
    Produced,
    load_ahead,
    load_rows,
    load_weight,
    rms_norm,
    store_scales,
)
from quaver.kernels.triton_produced import cast_axes as cast_produced_axes
from quaver.kernels.triton_produced import cast_tiles as cast_produced_tiles
from quaver.kernels.zero_pairs import zero_pair
from quaver.phases import phase
from quaver.scaling import EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

WIDEST = 16384
"""Columns of a row that fits on the chip; half of that where loads are narrow and positions take registers."""
STATISTICS_PROGRAMS = 512


def fits(hidden: Tensor) -> bool:
    """Whether rows of `hidden` [R, D] fit on the chip."""
    width = hidden.shape[1]
    return width * (2 if width % 16 else 1) <= WIDEST


@phase("quaver::cast")
def cast_layouts(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale, inverse_rms; None for what is not wanted.

    Here and below: hidden and weight are not empty, `triton_blocks.takes` accepts them, and hidden `fits`.
    """
    inverse_rms, observed = _empty_inverse_rms(hidden), _nothing_observed(hidden)
    _find_statistics(hidden, weight, eps, hp_dtype, inverse_rms=inverse_rms, observed=observed)
    made = cast_produced_tiles(
        Produced(hidden, weight, inverse_rms, hp_dtype),
        float8_dtype,
        rows=rows,
        columns=columns,
        quant_scale=None,
        observed=observed,
        power_of_2=power_of_2,
    )
    return *made, inverse_rms


@phase("quaver::cast")
def cast_with_persistent_scale(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale, what was observed, inverse_rms."""
    observed = _nothing_observed(hidden)
    if not columns:
        _find_statistics(hidden, weight, eps, hp_dtype, quant_scale=quant_scale, observed=observed)
        codes, quant, dequant, inverse_rms = _cast_whole_rows(
            hidden, weight, eps, hp_dtype, float8_dtype, power_of_2, quant_scale=quant_scale, observed=observed
        )
        return codes, None, quant, dequant, observed, inverse_rms
    inverse_rms = _empty_inverse_rms(hidden)
    _find_statistics(hidden, weight, eps, hp_dtype, inverse_rms=inverse_rms, observed=observed)
    made = cast_produced_tiles(
        Produced(hidden, weight, inverse_rms, hp_dtype),
        float8_dtype,
        rows=rows,
        columns=columns,
        quant_scale=quant_scale,
        observed=observed,
        power_of_2=power_of_2,
    )
    return *made, observed, inverse_rms


@phase("quaver::cast")
def cast_axes(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """Codes, quant_scale and dequant_scale of rows, then of columns; inverse_rms."""
    if not columns:
        *of_rows, inverse_rms = _cast_whole_rows(hidden, weight, eps, hp_dtype, float8_dtype, power_of_2)
        return *of_rows, None, None, None, inverse_rms
    inverse_rms = _empty_inverse_rms(hidden)
    row_amax = hidden.new_empty(hidden.shape[0], 1, dtype=torch.float32) if rows else None
    column_amax = hidden.new_zeros(1, hidden.shape[1], dtype=torch.float32)
    _find_statistics(hidden, weight, eps, hp_dtype, inverse_rms=inverse_rms, row_amax=row_amax, column_amax=column_amax)
    made = cast_produced_axes(
        Produced(hidden, weight, inverse_rms, hp_dtype),
        float8_dtype,
        row_amax=row_amax,
        column_amax=column_amax,
        power_of_2=power_of_2,
    )
    return *made, inverse_rms


def _empty_inverse_rms(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32)


def _nothing_observed(hidden: Tensor) -> Tensor:
    return zero_pair(hidden)


def _find_statistics(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    *,
    quant_scale: Tensor | None = None,
    inverse_rms: Tensor | None = None,
    observed: Tensor | None = None,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
) -> None:
    """Fill in, in one read of hidden, what is wanted: inverse_rms [R], and the amaxes of the norm: of all of it in
    observed[0], of rows [R, 1], of columns [1, D]; observed and column_amax are zeros before. Nothing is read or filled
    in where there is a quant_scale above 0."""
    height, width = hidden.shape
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=True)
    with torch.cuda.device_of(hidden):
        _row_statistics[(min(triton.cdiv(height, tile_rows), STATISTICS_PROGRAMS),)](
            hidden,
            weight,
            quant_scale,
            inverse_rms,
            observed,
            row_amax,
            column_amax,
            height,
            width,
            NORM_EPS=eps,
            HP=TRITON_HP[hp_dtype],
            AHEAD=load_ahead(width),
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=warps,
        )


def _cast_whole_rows(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    power_of_2: bool,
    *,
    quant_scale: Tensor | None = None,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, quant_scale, dequant_scale, inverse_rms: one scale a row, or the one that is kept, with what it sees."""
    fmt = format_of(float8_dtype)
    height, width = hidden.shape
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=False)
    codes = torch.empty_like(hidden, dtype=float8_dtype)
    quant = hidden.new_empty((height, 1) if quant_scale is None else (), dtype=torch.float32)
    dequant, inverse_rms = torch.empty_like(quant), _empty_inverse_rms(hidden)
    with torch.cuda.device_of(hidden):
        _cast_rows[(triton.cdiv(height, tile_rows),)](
            hidden,
            weight,
            quant_scale,
            observed,
            codes,
            quant,
            dequant,
            inverse_rms,
            height,
            width,
            NORM_EPS=eps,
            MAX=fmt.max,
            SATURATES_ABOVE=fmt.saturates_above,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            HP=TRITON_HP[hp_dtype],
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=warps,
        )
    return codes, quant, dequant, inverse_rms


@jit
def _row_statistics(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    NORM_EPS: tl.constexpr,
    HP: tl.constexpr,
    AHEAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    kept = 0.0 if quant_scale_ptr is None else tl.load(quant_scale_ptr)
    if not (kept > 0):
        row = tl.program_id(0).to(tl.int64) * TILE_ROWS
        stride = tl.num_programs(0).to(tl.int64) * TILE_ROWS
        down = tl.arange(0, TILE_ROWS)
        c = dealt_offsets(hidden_ptr, TILE_COLUMNS)
        in_tile = down.to(tl.int64)[:, None] * columns + c[None, :]
        across = (c < columns)[None, :]
        hidden = load_rows(hidden_ptr, row, in_tile, down, rows, across, columns)
        weight = load_weight(weight_ptr, hidden_ptr, c, columns, INTERPRETED)
        of_columns = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
        of_all = tl.zeros([TILE_ROWS], tl.int32)
        while row < rows:
            following = row + stride
            if AHEAD:
                hidden_ahead = load_rows(hidden_ptr, following, in_tile, down, rows, across, columns)
            wide = widen(hidden, INTERPRETED)
            inverse_rms = _inverse_rms(wide, columns, NORM_EPS)
            inside = row + down < rows
            tile = inside[:, None] & across
            bits = magnitude_bits(
                rms_norm(wide, inverse_rms, weight, tile, hidden_ptr.dtype.element_ty, HP, INTERPRETED)
            )
            if inverse_rms_ptr is not None:
                tl.store(inverse_rms_ptr + row + down, inverse_rms, mask=inside)
            if column_amax_ptr is not None:
                of_columns = tl.maximum(of_columns, bits)
            if row_amax_ptr is not None:
                tl.store(as_bits(row_amax_ptr) + row + down, tl.max(bits, 1), mask=inside)
            if observed_ptr is not None:
                of_all = tl.maximum(of_all, tl.max(bits, 1))
            row = following
            if AHEAD:
                hidden = hidden_ahead
            if not AHEAD:
                hidden = load_rows(hidden_ptr, row, in_tile, down, rows, across, columns)
        if column_amax_ptr is not None:
            # Lane by lane: atomics of 16 bytes apart would ask the cache for each sector again and again.
            c = tl.max_contiguous(tl.arange(0, TILE_COLUMNS), 1)
            tl.atomic_max(as_bits(column_amax_ptr) + c, tl.max(of_columns, 0), mask=c < columns, sem="relaxed")
        if observed_ptr is not None:
            tl.atomic_max(as_bits(observed_ptr), tl.max(of_all), sem="relaxed")


@jit
def _cast_rows(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    NORM_EPS: tl.constexpr,
    MAX: tl.constexpr,
    SATURATES_ABOVE: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HP: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    r = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = dealt_offsets(hidden_ptr, TILE_COLUMNS)
    at = r[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    hidden = widen(tl.load(hidden_ptr + at, mask=inside, other=0.0), INTERPRETED)
    weight = load_weight(weight_ptr, hidden_ptr, c, columns, INTERPRETED)
    inverse_rms = _inverse_rms(hidden, columns, NORM_EPS)
    tl.store(inverse_rms_ptr + r, inverse_rms, mask=r < rows)
    normed = rms_norm(hidden, inverse_rms, weight, inside, hidden_ptr.dtype.element_ty, HP, INTERPRETED)
    if quant_scale_ptr is None:
        amax = tl.max(magnitude_bits(normed), 1).to(tl.float32, bitcast=True)
        quant = own_quant_scale(amax, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
        store_scales(quant_ptr, dequant_ptr, quant, r, rows)
        codes = to_float8(normed * quant[:, None], FLOAT8, INTERPRETED)
    else:
        recorded = tl.load(as_bits(observed_ptr))
        quant = quant_scale_of_matrix(quant_scale_ptr, recorded, MAX, LARGEST_QUANT_SCALE, POWER_OF_2, "kept")
        store_scale_once(quant_ptr, dequant_ptr, quant, tl.program_id(0))
        scaled = scaled_by(normed, quant, "kept")
        observe(observed_ptr, recorded, normed, scaled, quant, SATURATES_ABOVE)
        codes = to_float8(scaled, FLOAT8, INTERPRETED)
    tl.store(codes_ptr + at, codes, mask=inside)


@jit
def _inverse_rms(hidden: tl.tensor, columns: tl.tensor, NORM_EPS: tl.constexpr) -> tl.tensor:
    """float32 [rows], of whole rows that are 0 behind their ends."""
    mean_square = tl.sum(hidden * hidden, 1) / columns
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + NORM_EPS))  # tl.rsqrt takes subnormal numbers for zero
