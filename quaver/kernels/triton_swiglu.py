"""SwiGLU, cast to float8 as it is computed, on an NVIDIA GPU, in Triton.

    product     = RNh(RNh(silu(gate)) * up)             silu(x) = x / (1 + exp(-x)); RNh: to the dtype of gate and up

with the roundings of PyTorch's expression. Bytes of an element in bfloat16:

                                scales of              reads of gate and up            bytes, rows / both
    cast_layouts                the product's amax     2: the amax; the cast           9 / 10
    cast_with_persistent_scale        an earlier amax        1, or 2 where it is not known   5 / 6
    cast_axes                   row and column amaxes  1 for rows that fit on the      5 / 10
                                                       chip, else 2

Grid and tile: the casts with one scale and those with scales of columns are triton_produced.py's. `_amax_if_unknown`
strides over flat tiles, as triton_cast.py's does; `_axis_amaxes` walks down with the next tile under way, as
triton_reduce.py's does; `_cast_rows` has whole rows, as triton_rows.py's.
Mask: what lies outside is read as 0, and not written. Positions are 64-bit. Results do not depend on the order of
programs, nothing waits for the device, and a CUDA graph can capture a call once a first one has compiled the kernels.
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
    load_tile,
    magnitude_bits,
    own_quant_scale,
    to_float8,
    widen,
)
from quaver.kernels.triton_produced import (
    FLAT_BYTES,
    FLAT_WARPS,
    TRITON_HP,
    Made,
    Produced,
    store_scales,
    swiglu,
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

AMAX_PROGRAMS = 1024
BLOCK_ROWS = 256
TILE_ROWS = 16
AXES_WARPS = 8
WIDEST_BYTES = 65536
"""Of a row of gate that fits on the chip, beside one of up; half of that where loads are narrow."""


@phase("quaver::cast")
def cast_layouts(
    gate: Tensor, up: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale of the product of two matrices that are not empty and that
    `triton_blocks.takes` accepts; None for what is not wanted."""
    return cast_produced_tiles(
        _product(gate, up),
        float8_dtype,
        rows=rows,
        columns=columns,
        quant_scale=None,
        observed=_amax_unless_known(gate, up, None),
        power_of_2=power_of_2,
    )


@phase("quaver::cast")
def cast_with_persistent_scale(
    gate: Tensor,
    up: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """What `cast_layouts` returns, and what was observed."""
    observed = _amax_unless_known(gate, up, quant_scale)
    made = cast_produced_tiles(
        _product(gate, up),
        float8_dtype,
        rows=rows,
        columns=columns,
        quant_scale=quant_scale,
        observed=observed,
        power_of_2=power_of_2,
    )
    return *made, observed


@phase("quaver::cast")
def cast_axes(gate: Tensor, up: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    """Codes, quant_scale and dequant_scale of rows, then of columns; see `cast_layouts`."""
    if not columns and _rows_fit(gate):
        return *_cast_whole_rows(gate, up, float8_dtype, power_of_2), None, None, None
    row_amax, column_amax = _amaxes_of_axes(gate, up, rows, columns)
    return cast_produced_axes(
        _product(gate, up), float8_dtype, row_amax=row_amax, column_amax=column_amax, power_of_2=power_of_2
    )


def _product(gate: Tensor, up: Tensor) -> Produced:
    return Produced(gate, up, None, gate.dtype)


def _rows_fit(gate: Tensor) -> bool:
    width = gate.shape[1]
    return width * gate.element_size() * (2 if width % 16 else 1) <= WIDEST_BYTES


def _amax_unless_known(gate: Tensor, up: Tensor, quant_scale: Tensor | None) -> Tensor:
    """float32 [2]: the amax of the product (0 where the quant_scale is above 0), and 0."""
    observed = zero_pair(gate)
    tile = FLAT_BYTES // gate.element_size()
    with torch.cuda.device_of(gate):
        _amax_if_unknown[(min(triton.cdiv(gate.numel(), tile), AMAX_PROGRAMS),)](
            gate,
            up,
            quant_scale,
            observed,
            gate.numel(),
            HP=TRITON_HP[gate.dtype],
            TILE=tile,
            INTERPRETED=INTERPRETED,
            num_warps=FLAT_WARPS,
        )
    return observed


def _amaxes_of_axes(gate: Tensor, up: Tensor, rows: bool, columns: bool) -> tuple[Tensor | None, Tensor | None]:
    """float32 [R, 1] and [1, C], None for what is not wanted; see `triton_reduce.axis_amaxes`."""
    height, width = gate.shape
    zeros = gate.new_zeros(height * rows + width * columns, dtype=torch.float32)  # one fill for both
    row_amax = zeros[:height].view(height, 1) if rows else None
    column_amax = zeros[height * rows :].view(1, width) if columns else None
    tile_columns = 512 // gate.element_size()  # what a warp loads at once, so that a row's amax stays within it
    with torch.cuda.device_of(gate):
        _axis_amaxes[(triton.cdiv(width, tile_columns) * triton.cdiv(height, BLOCK_ROWS),)](
            gate,
            up,
            row_amax,
            column_amax,
            height,
            width,
            HP=TRITON_HP[gate.dtype],
            BLOCK_ROWS=BLOCK_ROWS,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=AXES_WARPS,
        )
    return row_amax, column_amax


def _cast_whole_rows(gate: Tensor, up: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Made:
    """Codes, quant_scale, dequant_scale of rows that fit on the chip."""
    fmt = format_of(float8_dtype)
    height, width = gate.shape
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=False)
    codes = torch.empty_like(gate, dtype=float8_dtype)
    quant = gate.new_empty(height, 1, dtype=torch.float32)
    dequant = torch.empty_like(quant)
    with torch.cuda.device_of(gate):
        _cast_rows[(triton.cdiv(height, tile_rows),)](
            gate,
            up,
            codes,
            quant,
            dequant,
            height,
            width,
            MAX=fmt.max,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            HP=TRITON_HP[gate.dtype],
            FLOAT8=TRITON_FLOAT8[float8_dtype],
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=warps,
        )
    return codes, quant, dequant


@jit
def _amax_if_unknown(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    numel: tl.tensor,
    HP: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """observed[0] = max |product|, unless there is a quant_scale that is known. observed[0] was 0."""
    kept = 0.0 if quant_scale_ptr is None else tl.load(quant_scale_ptr)
    if not (kept > 0):
        bits = tl.zeros([TILE], tl.int32)
        tile = tl.program_id(0)
        # No range: under NumPy 2.4 the interpreter of Triton 3.6 takes no computed bounds (triton-lang/triton#9171).
        while tile.to(tl.int64) * TILE < numel:
            gate = load_tile(gate_ptr, tile, numel, TILE, INTERPRETED)
            up = load_tile(up_ptr, tile, numel, TILE, INTERPRETED)
            bits = tl.maximum(bits, magnitude_bits(swiglu(gate, up, HP, INTERPRETED)))
            tile += tl.num_programs(0)
        tl.atomic_max(as_bits(observed_ptr), tl.max(bits), sem="relaxed")


@jit
def _axis_amaxes(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    HP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, TILE_COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * BLOCK_ROWS
    end = tl.minimum(row + BLOCK_ROWS, rows)
    c = (tl.program_id(0) % across).to(tl.int64) * TILE_COLUMNS + dealt_offsets(gate_ptr, TILE_COLUMNS)
    down = tl.arange(0, TILE_ROWS)
    in_tile = down.to(tl.int64)[:, None] * columns + c[None, :]
    inside = (c < columns)[None, :]
    mask = (row + down < end)[:, None] & inside
    gate = tl.load(gate_ptr + row * columns + in_tile, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * columns + in_tile, mask=mask, other=0.0)
    of_columns = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    while row < end:
        following = row + TILE_ROWS
        mask = (following + down < end)[:, None] & inside
        gate_ahead = tl.load(gate_ptr + following * columns + in_tile, mask=mask, other=0.0)
        up_ahead = tl.load(up_ptr + following * columns + in_tile, mask=mask, other=0.0)
        bits = magnitude_bits(swiglu(widen(gate, INTERPRETED), widen(up, INTERPRETED), HP, INTERPRETED))
        if row_amax_ptr is not None:
            tl.atomic_max(as_bits(row_amax_ptr) + row + down, tl.max(bits, 1), mask=row + down < end, sem="relaxed")
        if column_amax_ptr is not None:
            of_columns = tl.maximum(of_columns, bits)
        gate = gate_ahead
        up = up_ahead
        row = following
    if column_amax_ptr is not None:
        tl.atomic_max(as_bits(column_amax_ptr) + c, tl.max(of_columns, 0), mask=c < columns, sem="relaxed")


@jit
def _cast_rows(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HP: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    r = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = dealt_offsets(gate_ptr, TILE_COLUMNS)
    at = r[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    product = swiglu(widen(gate, INTERPRETED), widen(up, INTERPRETED), HP, INTERPRETED)
    amax = tl.max(magnitude_bits(product), 1).to(tl.float32, bitcast=True)
    quant = own_quant_scale(amax, MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
    store_scales(quant_ptr, dequant_ptr, quant, r, rows)
    tl.store(codes_ptr + at, to_float8(product * quant[:, None], FLOAT8, INTERPRETED), mask=inside)
