"""What the Triton kernels of this folder share: which tensors they take, and the steps that work on tiles.

The steps are functions of the device, to be called from a kernel. They compute what quaver/scaling.py says, bit for
bit, with NaN, inf, zero and subnormal numbers; nothing is flushed to zero. INTERPRETED is handed to kernels as a
constant, because functions are the only globals that they may read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.formats import HP_DTYPES
from quaver.scaling import PLAIN_TYPES

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET was 1 when triton was imported."""

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What NVIDIA GPUs convert to in hardware."""

TRITON_FLOAT8 = {} if triton is None else dict(zip(FLOAT8_DTYPES, (tl.float8e4nv, tl.float8e5), strict=True))

FIRST_CAPABILITY = (9, 0)
"""From here on Triton converts float32 to float8 in one rounding. On 8.9 its releases up to 3.6 at least go through
float16 (triton-lang/triton#11753), and below it has no e4m3."""


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or nothing where there is no triton."""
    if triton is None:
        return kernel
    # A scale is 4 bytes of a larger tensor. Its alignment is chance and gains nothing: not worth a second compilation.
    return triton.jit(kernel, do_not_specialize_on_alignment=["quant_scale_ptr"])


def takes(hp: Tensor, float8_dtype: torch.dtype) -> bool:
    """Whether the kernels can cast `hp` to `float8_dtype`: a plain, contiguous tensor on a GPU that rounds once.

    In Triton's interpreter: such a tensor on the CPU. Do not ask while compiling.
    """
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


@jit
def load_tile(
    hp_ptr: tl.tensor, tile: tl.tensor, numel: tl.tensor, TILE: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """float32 [TILE]: a flat hp from tile * TILE on, 0 behind its end."""
    start = tile.to(tl.int64) * TILE
    offsets = dealt_offsets(hp_ptr, TILE)
    return widen(tl.load(hp_ptr + start + offsets, mask=start + offsets < numel, other=0.0), INTERPRETED)


@jit
def dealt_offsets(hp_ptr: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """0 to TILE, dealt out to threads by 16 bytes of hp, so that the lanes of a warp load 512 bytes in a row.

    Without this hint the compiler deals by 16 codes, for the widest stores, and the lanes load with gaps between them.
    """
    return tl.max_contiguous(tl.arange(0, TILE), 128 // hp_ptr.dtype.element_ty.primitive_bitwidth)


@jit
def widen(hp: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """hp as float32, exactly."""
    if INTERPRETED and hp.dtype == tl.bfloat16:
        return _widen_bfloat16(hp)
    return hp.to(tl.float32)


@jit
def magnitude_bits(hp: tl.tensor) -> tl.tensor:
    """The bits of |hp| as int32: ordered like |hp|, NaNs on top."""
    return hp.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def as_bits(observed_ptr: tl.tensor) -> tl.tensor:
    """A pointer to the same numbers as int32, which order like float32 that is not negative."""
    return observed_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@jit
def divide(dividend: tl.constexpr, divisor: tl.tensor) -> tl.tensor:
    """RN32(dividend / divisor), through float64: see [Note: one division, two formulas] in scaling.py.

    Not tl.div_rn, which flushes subnormal numbers to zero in Triton 3.5.
    """
    return (dividend / divisor.to(tl.float64)).to(tl.float32)


@jit
def own_quant_scale(
    amax: tl.tensor, MAX: tl.constexpr, LARGEST_QUANT_SCALE: tl.constexpr, POWER_OF_2: tl.constexpr
) -> tl.tensor:
    """`quaver.scaling.amax_to_quant_scale` of float32 numbers."""
    quant = _divide_normal(MAX, amax)
    quant = tl.where(quant > LARGEST_QUANT_SCALE, LARGEST_QUANT_SCALE, quant)
    if POWER_OF_2:
        mantissa_cleared = (quant.to(tl.int32, bitcast=True) & -(1 << 23)).to(tl.float32, bitcast=True)
        quant = tl.where(quant == quant, mantissa_cleared, quant)  # a NaN without its mantissa would be an inf
    return quant


@jit
def quant_scale_of_matrix(
    quant_scale_ptr: tl.tensor,
    recorded: tl.tensor,
    MAX: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SCALE: tl.constexpr,
) -> tl.tensor:
    """float32: one scale for the whole matrix.

    SCALE is "amax": that of the amax whose bits are `recorded`; or "kept": what quant_scale_ptr holds, where that is
    above 0, else the former.
    """
    if SCALE == "amax":
        quant = own_quant_scale(recorded.to(tl.float32, bitcast=True), MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
    else:
        quant = tl.load(quant_scale_ptr)
        if not (quant > 0):
            quant = own_quant_scale(recorded.to(tl.float32, bitcast=True), MAX, LARGEST_QUANT_SCALE, POWER_OF_2)
    return quant


@jit
def store_scale_once(quant_ptr: tl.tensor, dequant_ptr: tl.tensor, quant: tl.tensor, tile: tl.tensor) -> None:
    """The scale of a whole matrix and its dequant_scale, written by the program of tile 0."""
    if tile == 0:
        tl.store(quant_ptr, quant)
        tl.store(dequant_ptr, divide(1.0, quant))


@jit
def own_dequant_scale(quant: tl.tensor) -> tl.tensor:
    """`quaver.scaling.to_dequant_scale` of what `own_quant_scale` gave."""
    return _divide_normal(1.0, quant)


@jit
def _divide_normal(dividend: tl.constexpr, divisor: tl.tensor) -> tl.tensor:
    """RN32(dividend / divisor) where every thread divides: float64 costs little on a data center's GPU only.

    For scales of amaxes, because Triton 3.5 flushes subnormal numbers to zero here. That changes no such scale: a
    subnormal amax is below EPS, with the scale of all those; and every other quotient is 0, inf, NaN or normal.
    """
    return tl.div_rn(dividend, divisor)


@jit
def scaled_by(hp: tl.tensor, quant: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """RN32(hp * quant). With a kept scale NaN where hp is infinite, because no such scale tells of it."""
    if SCALE == "kept":  # hp * 0 is a zero with hp's sign, which changes no bit of the product; or NaN
        return tl.fma(hp, quant, hp * 0.0)
    return hp * quant


@jit
def to_float8(scaled: tl.tensor, FLOAT8: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """RNE8(clamp(scaled, -max, max)): the hardware rounds two numbers at once, saturates, and keeps NaN.

    No clamp comes before it. It would change nothing, and a clamp that keeps NaN is what corrupts transposed stores of
    single bytes in Triton 3.8 (triton-lang/triton#11111).
    """
    if INTERPRETED:
        return _round_to_float8(scaled, FLOAT8)
    return scaled.to(FLOAT8)


@jit
def observe(
    observed_ptr: tl.tensor,
    recorded: tl.tensor,
    hp: tl.tensor,
    scaled: tl.tensor,
    quant: tl.tensor,
    SATURATES_ABOVE: tl.constexpr,
) -> None:
    """Record a tile of a cast with a kept scale: its amax by a maximum, and how many elements saturated by a sum.

    `recorded` is some earlier bits of the amax, which only grows: it spares nearly all programs the atomic.
    """
    bits = tl.max(magnitude_bits(hp))
    tl.atomic_max(as_bits(observed_ptr), bits, mask=bits > recorded, sem="relaxed")
    # Rounded products order like their factors: where the largest does not saturate, there is nothing to count.
    if not (bits.to(tl.float32, bitcast=True) * quant <= SATURATES_ABOVE):
        count = tl.sum((tl.abs(scaled) > SATURATES_ABOVE).to(tl.int32))
        tl.atomic_add(observed_ptr + 1, count.to(tl.float32), mask=count > 0, sem="relaxed")


# What follows replaces two conversions that Triton's interpreter gets wrong (`_convert_float`, 3.6 to 3.9), and is used
# there only. Its bfloat16 -> float32 drops the leading bit of subnormals. Its float32 -> float8 rounds halves up, loses
# the carry out of the mantissa where the exponent is odd (1.97 -> 1), and cuts subnormal results off. It can go with
# triton-lang/triton#8322 (a fix is in #11897).


@jit
def _widen_bfloat16(hp: tl.tensor) -> tl.tensor:
    return (hp.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _round_to_float8(scaled: tl.tensor, FLOAT8: tl.constexpr) -> tl.tensor:
    """Round by adding the power of two whose last place is one step of the float8 format at this exponent."""
    MAX: tl.constexpr = 448.0 if FLOAT8.fp_mantissa_width == 3 else 57344.0
    clamped = tl.clamp(scaled, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    MANTISSA_BITS: tl.constexpr = FLOAT8.fp_mantissa_width
    SMALLEST_NORMAL: tl.constexpr = 128 - FLOAT8.exponent_bias  # float8's lowest exponent, as float32 stores it
    bits = clamped.to(tl.int32, bitcast=True)
    exponent = tl.maximum(magnitude_bits(clamped) >> 23, SMALLEST_NORMAL)
    power = (exponent + (23 - MANTISSA_BITS)) << 23
    steps = (tl.abs(clamped) + power.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - power
    code = ((exponent - SMALLEST_NORMAL) << MANTISSA_BITS) + steps
    code = tl.where(clamped == clamped, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(FLOAT8, bitcast=True)
