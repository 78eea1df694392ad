"""Stores float32 moments in 8 or 16 bits: counter-based random bits, stochastic rounding, one scale per block.

Values are float32 [B, 256], whose rows are blocks of one or more parameters. csrc/adamw.h is bit-identical.

    random     = mix(block_key + lane * 0x9E3779B9)              32 bits per element
    block_key  = mix(key + block * 0x9E3779B1)                   `block` counts the blocks of the whole parameter
    key        = make_step_key(seed, step, position)             `position` is the parameter's index in the optimizer

    e4m3       quant_scale = min(RN32(448 / amax), 2^120), dequant_scale = RN32(1 / quant_scale).
               code = |x| * quant_scale, rounded up or down so that its expected value is exact; at most 448.
    bfloat16   x, rounded the same way.
    root       e4m3 stores the square root of the second moment, and never rounds a positive root to 0.

e4m3 has 3 mantissa bits, bfloat16 has 7. Rounding adds 16 random bits below the mantissa. They carry into it with a
probability equal to the fraction that the lower bits represent, and representable values do not change. Below 2^-6,
e4m3 values are 2^-9 apart. Adding 2^-6 first moves them to where float32's mantissa has this spacing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.adamw import MOMENT_BLOCK_ELEMENTS
from quaver.recipes.formats import E4M3

LARGEST_QUANT_SCALE = 2.0**120
"""The largest quant_scale whose reciprocal is a normal number."""

# 2^32 / golden ratio, and the nearest smaller number that is prime
_LANE_MULTIPLIER, _BLOCK_MULTIPLIER = 0x9E3779B9, 0x9E3779B1
_SECOND_DRAW = 0x85EBCA6B
_LARGEST_CODE = 0x7E
_DROPPED_BITS = 23 - E4M3.mantissa_bits
_BIAS_DIFFERENCE = (127 - E4M3.bias) << E4M3.mantissa_bits
_SMALLEST_NORMAL_CODE = 1 << E4M3.mantissa_bits


def _to_int32(bits: int) -> int:
    """Reinterpret an unsigned 32-bit int as int32."""
    return bits - (1 << 32) if bits & (1 << 31) else bits


def mix(bits: Tensor) -> Tensor:
    """Hash int32 to int32 with C. Wellons' lowbias32, https://nullprogram.com/blog/2018/07/31/."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _to_int32(0x846CA68B)
    return bits ^ ((bits >> 16) & 0xFFFF)


def mix_int(bits: int) -> int:
    """Compute `mix` for an int from 0 to 2^32 - 1."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ bits >> 16


def make_step_key(seed: int, step: int, position: int) -> int:
    """Hash the seed, the number of the step and the parameter's index in the optimizer to 32 bits."""
    key = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, step, position):
        key = mix_int((key + _BLOCK_MULTIPLIER + word) & 0xFFFFFFFF)
    return key


def make_block_keys(key: Tensor, block: Tensor) -> Tensor:
    """Hash the keys of parameters and the numbers of their blocks to keys of blocks, all int32 [B]."""
    return mix(key + block * _to_int32(_BLOCK_MULTIPLIER))


def draw_random_bits(keys: Tensor) -> Tensor:
    """Return random int32 [B, 256] for the keys [B] of blocks."""
    lanes = torch.arange(MOMENT_BLOCK_ELEMENTS, dtype=torch.int32, device=keys.device) * _to_int32(_LANE_MULTIPLIER)
    return mix(keys[:, None] + lanes)


def draw_more_random_bits(bits: Tensor) -> Tensor:
    """Return a second random int32 for each of `bits`."""
    return mix(bits ^ _to_int32(_SECOND_DRAW))


def take_low16(bits: Tensor) -> Tensor:
    """Return the lower 16 bits of each int32."""
    return bits & 0xFFFF


def take_high16(bits: Tensor) -> Tensor:
    """Return the upper 16 bits of each int32."""
    return (bits >> 16) & 0xFFFF


def compute_moment_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute quant_scale and dequant_scale from the amaxes of blocks, all float32 of one shape.

    The divisions are in float64, which all devices round alike.
    """
    quant_scale = (E4M3.max / amax.double()).float().clamp(max=LARGEST_QUANT_SCALE)
    return quant_scale, (1.0 / quant_scale.double()).float()


def quantize_moment(blocks: Tensor, amax: Tensor, bits16: Tensor, *, is_root: bool) -> tuple[Tensor, Tensor]:
    """Quantize float32 [B, 256] to e4m3.

    Args:
        amax: the largest magnitude of each block, float32 [B], finite.
        bits16: random bits, int32 [B, 256], 0 to 65535.
        is_root: round positive values to at least the smallest positive code.
    Returns:
        Codes, uint8 [B, 256], and dequant_scale, float32 [B].
    """
    quant_scale, dequant_scale = compute_moment_scales(amax)
    magnitude = blocks.abs() * quant_scale[:, None]
    is_subnormal = magnitude < E4M3.smallest_normal
    shifted = torch.where(is_subnormal, magnitude + E4M3.smallest_normal, magnitude)
    code = ((shifted.view(torch.int32) + (bits16 << (_DROPPED_BITS - 16))) >> _DROPPED_BITS) - _BIAS_DIFFERENCE
    code = torch.where(is_subnormal, code - _SMALLEST_NORMAL_CODE, code).clamp(max=_LARGEST_CODE)
    if is_root:
        code = torch.maximum(code, (magnitude > 0).to(torch.int32))
    sign = (blocks.view(torch.int32) >> 24) & 0x80
    return (code | sign).to(torch.uint8), dequant_scale


def dequantize_moment(codes: Tensor, dequant_scale: Tensor) -> Tensor:
    """Dequantize codes, uint8 [B, 256], with scales, float32 [B], to float32 [B, 256]."""
    return codes.view(E4M3.dtype).float() * dequant_scale[:, None]
