"""The cast with a kept scale on an NVIDIA GPU, in Triton: `quaver.scaling.cast_with_kept_scale`, bit for bit.

    quant     = quant_scale where that is above 0, else RN32(max / amax), capped, optionally rounded down to 2^k
    scaled    = RN32(float32(hp) * quant)              NaN where hp is infinite
    codes     = RNE8(clamp(scaled, -max, max))
    dequant   = RN32(1 / quant)
    observed  = [amax, how many |scaled| are above saturates_above]        amax = max |hp|

Only the device knows whether the scale is known, and so whether hp must be read once or twice. Two kernels are launched
in any case, and the first leaves at once where there is nothing for it to do:

    _amax_if_unknown   observed[0] = amax     scale known: reads 4 bytes;   unknown: reads hp once
    _cast              the rest               either way: reads hp once, writes the codes once

Grid and tile: hp is flat. A tile is TILE_BYTES of it, 64 bytes for each thread: four loads of 16 bytes under way at a
time. `_cast` has one program for each tile. `_amax_if_unknown` has at most AMAX_PROGRAMS, which stride over the tiles,
because a full grid that leaves at once takes microseconds to do so.
Mask: what lies behind the end of hp is read as 0, and not written. Where numel is a multiple of 16 and hp starts on 16
bytes, the mask holds for whole loads; elsewhere loads and stores are narrow.
Positions are 64-bit.

Zero, subnormal, inf, NaN: nothing is flushed to zero. The amax is a maximum of bits, which order like magnitudes with
NaNs on top, so a NaN comes out as a NaN. An infinite or NaN element becomes NaN and is not counted as saturated. An
empty hp has the amax 0. A negative or NaN quant_scale is not known.

The host reads nothing back and waits for nothing: once a first call has compiled the kernels, a CUDA graph can capture
the call. Results do not depend on the order of programs: they are maxima, and sums of integers (exact up to 2^24).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.formats import HP_DTYPES, format_of
from quaver.scaling import EPS, PLAIN_TYPES

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET was 1 when triton was imported."""

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What NVIDIA GPUs convert to in hardware."""

FIRST_CAPABILITY = (9, 0)
"""From here on Triton converts float32 to float8 in one rounding. On 8.9 its releases up to 3.6 at least go through
float16 (triton-lang/triton#11753), and below it has no e4m3."""

TILE_BYTES = 8192
WARPS = 4
AMAX_PROGRAMS = 1024


def _jit(kernel: Callable[..., Any]) -> Any:
    if triton is None:
        return kernel
    # A scale is 4 bytes of a larger tensor. Its alignment is chance and gains nothing: not worth a second compilation.
    return triton.jit(kernel, do_not_specialize_on_alignment=["quant_scale_ptr"])


def takes(hp: Tensor, float8_dtype: torch.dtype) -> bool:
    """Whether `cast_with_kept_scale` of this file can cast `hp` to `float8_dtype`."""
    return (
        triton is not None
        and type(hp) in PLAIN_TYPES
        and hp.dtype in HP_DTYPES
        and float8_dtype in FLOAT8_DTYPES
        and hp.is_contiguous()
        and (_rounds_once(hp.device.index) if hp.is_cuda else INTERPRETED and hp.is_cpu)
    )


@functools.cache
def _rounds_once(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= FIRST_CAPABILITY


def cast_with_kept_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quaver.scaling.cast_with_kept_scale` of an `hp` that `takes` accepts, with a `quant_scale` on hp's device."""
    fmt = format_of(float8_dtype)
    codes = torch.empty_like(hp, dtype=float8_dtype)
    quant, dequant = hp.new_empty((), dtype=torch.float32), hp.new_empty((), dtype=torch.float32)
    observed = hp.new_zeros(2, dtype=torch.float32)
    numel, tile = hp.numel(), TILE_BYTES // hp.element_size()
    tiles = triton.cdiv(numel, tile)
    common = {"TILE": tile, "INTERPRETED": INTERPRETED, "num_warps": WARPS}
    with torch.cuda.device_of(hp):
        if tiles:
            _amax_if_unknown[(min(tiles, AMAX_PROGRAMS),)](hp, quant_scale, observed, numel, **common)
        _cast[(max(tiles, 1),)](  # without elements there still are scales to write
            hp,
            quant_scale,
            codes,
            quant,
            dequant,
            observed,
            numel,
            MAX=fmt.max,
            SATURATES_ABOVE=fmt.saturates_above,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            **common,
        )
    return codes, quant, dequant, observed


@_jit
def _amax_if_unknown(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """observed[0] = max |hp|, unless quant_scale is known. observed[0] was 0."""
    if not (tl.load(quant_scale_ptr) > 0):
        bits = tl.zeros([TILE], tl.int32)
        tile = tl.program_id(0)
        # No range: under NumPy 2.4 the interpreter of Triton 3.6 takes no computed bounds (triton-lang/triton#9171).
        while tile.to(tl.int64) * TILE < numel:
            bits = tl.maximum(bits, _magnitude_bits(_load_tile(hp_ptr, tile, numel, TILE, INTERPRETED)))
            tile += tl.num_programs(0)
        tl.atomic_max(_as_bits(observed_ptr), tl.max(bits), sem="relaxed")


@_jit
def _cast(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    numel: tl.tensor,
    MAX: tl.constexpr,
    SATURATES_ABOVE: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """All but the amax for a scale that is not known, which is in observed[0] by now."""
    tile = tl.program_id(0)
    hp = _load_tile(hp_ptr, tile, numel, TILE, INTERPRETED)
    quant = tl.load(quant_scale_ptr)
    recorded = tl.load(_as_bits(observed_ptr))
    if not (quant > 0):
        quant = _own_quant_scale(recorded.to(tl.float32, bitcast=True), MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
    if tile == 0:
        tl.store(quant_ptr, quant)
        tl.store(dequant_ptr, _divide(1.0, quant))

    # hp * 0 is a zero with hp's sign, which changes no bit of the product; or NaN, where hp is infinite or NaN.
    scaled = tl.fma(hp, quant, hp * 0.0)
    clamped = tl.clamp(scaled, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    start = tile.to(tl.int64) * TILE
    offsets = _offsets(hp_ptr, TILE)
    codes = _to_float8(clamped, codes_ptr.dtype.element_ty, INTERPRETED)
    tl.store(codes_ptr + start + offsets, codes, mask=start + offsets < numel)

    bits = tl.max(_magnitude_bits(hp))
    # `recorded` is some earlier value of a maximum that only grows: it spares nearly all programs the atomic.
    tl.atomic_max(_as_bits(observed_ptr), bits, mask=bits > recorded, sem="relaxed")
    # Rounded products order like their factors: where the largest does not saturate, there is nothing to count.
    if not (bits.to(tl.float32, bitcast=True) * quant <= SATURATES_ABOVE):
        count = tl.sum((tl.abs(scaled) > SATURATES_ABOVE).to(tl.int32))
        tl.atomic_add(observed_ptr + 1, count.to(tl.float32), mask=count > 0, sem="relaxed")


@_jit
def _load_tile(
    hp_ptr: tl.tensor, tile: tl.tensor, numel: tl.tensor, TILE: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """float32 [TILE]: hp from tile * TILE on, 0 behind its end."""
    start = tile.to(tl.int64) * TILE
    offsets = _offsets(hp_ptr, TILE)
    hp = tl.load(hp_ptr + start + offsets, mask=start + offsets < numel, other=0.0)
    if INTERPRETED and hp.dtype == tl.bfloat16:
        return _widen_bfloat16(hp)
    return hp.to(tl.float32)


@_jit
def _offsets(hp_ptr: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """0 to TILE, dealt out to threads by 16 bytes of hp, so that the lanes of a warp load 512 bytes in a row.

    Without this hint the compiler deals by 16 codes, for the widest stores, and the lanes load with gaps between them.
    """
    return tl.max_contiguous(tl.arange(0, TILE), 128 // hp_ptr.dtype.element_ty.primitive_bitwidth)


@_jit
def _magnitude_bits(hp: tl.tensor) -> tl.tensor:
    """The bits of |hp| as int32: ordered like |hp|, NaNs on top."""
    return hp.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@_jit
def _as_bits(observed_ptr: tl.tensor) -> tl.tensor:
    return observed_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@_jit
def _divide(dividend: tl.constexpr, divisor: tl.tensor) -> tl.tensor:
    """RN32(dividend / divisor), through float64: see [Note: one division, two formulas] in scaling.py.

    Not tl.div_rn, which flushes subnormal numbers to zero in Triton 3.5.
    """
    return (dividend / divisor.to(tl.float64)).to(tl.float32)


@_jit
def _own_quant_scale(
    amax: tl.tensor, MAX: tl.constexpr, LARGEST_QUANT_SCALE: tl.constexpr, POWER_OF_2: tl.constexpr
) -> tl.tensor:
    """`quaver.scaling.amax_to_quant_scale` of one float32 number."""
    quant = _divide(MAX, amax)
    quant = tl.where(quant > LARGEST_QUANT_SCALE, LARGEST_QUANT_SCALE, quant)
    if POWER_OF_2:
        mantissa_cleared = (quant.to(tl.int32, bitcast=True) & -(1 << 23)).to(tl.float32, bitcast=True)
        quant = tl.where(quant == quant, mantissa_cleared, quant)  # a NaN without its mantissa would be an inf
    return quant


@_jit
def _to_float8(clamped: tl.tensor, FLOAT8: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """The hardware rounds two numbers at once: to nearest even, subnormals kept, NaN to NaN."""
    if INTERPRETED:
        return _round_to_float8(clamped, FLOAT8)
    return clamped.to(FLOAT8)


# What follows replaces two conversions that Triton's interpreter gets wrong (`_convert_float`, 3.6 to 3.9), and is used
# there only. Its bfloat16 -> float32 drops the leading bit of subnormals. Its float32 -> float8 rounds halves up, loses
# the carry out of the mantissa where the exponent is odd (1.97 -> 1), and cuts subnormal results off. It can go with
# triton-lang/triton#8322 (a fix is in #11897).


@_jit
def _widen_bfloat16(hp: tl.tensor) -> tl.tensor:
    return (hp.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@_jit
def _round_to_float8(clamped: tl.tensor, FLOAT8: tl.constexpr) -> tl.tensor:
    """Round by adding the power of two whose last place is one step of the float8 format at this exponent."""
    MANTISSA_BITS: tl.constexpr = FLOAT8.fp_mantissa_width
    SMALLEST_NORMAL: tl.constexpr = 128 - FLOAT8.exponent_bias  # float8's lowest exponent, as float32 stores it
    bits = clamped.to(tl.int32, bitcast=True)
    exponent = tl.maximum(_magnitude_bits(clamped) >> 23, SMALLEST_NORMAL)
    power = (exponent + (23 - MANTISSA_BITS)) << 23
    steps = (tl.abs(clamped) + power.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - power
    code = ((exponent - SMALLEST_NORMAL) << MANTISSA_BITS) + steps
    code = tl.where(clamped == clamped, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(FLOAT8, bitcast=True)
