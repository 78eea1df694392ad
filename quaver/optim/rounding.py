"""Stores float32 moments in 8 or 16 bits: counter-based random bits, stochastic rounding, one scale per block.

Everything here is on blocks: tensors [B, 256], float32, whose rows are blocks of one parameter or of many. csrc/adamw.h
computes the same bits.

    random     = mix(block_key + lane * 0x9E3779B9)              32 bits per element, by its index in the parameter
    block_key  = mix(key + block * 0x9E3779B1)                   `block` counts the blocks of the whole parameter
    key        = of the seed, the step and the parameter's index in the optimizer; see `step_key`

    e4m3       quant_scale = min(RN32(448 / amax), 2^120), scale = RN32(1 / quant_scale)
               code = |x| * quant_scale rounded up or down, so that the expected value is kept; at most 448
    bfloat16   the same rounding of x itself
    root       of the second moment e4m3 holds the square root, and rounds none above 0 down to 0

An e4m3 has 3 bits of mantissa, a bfloat16 7. 16 random bits are added below them, and carry into them with the
probability that the lower bits, as a fraction, ask for. What has no lower bits stays what it is. Below 2^-6 numbers of
e4m3 are 2^-9 apart: adding 2^-6 first brings them to where float32's mantissa has that spacing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.adamw import BLOCK
from quaver.recipes.formats import E4M3

LARGEST_QUANT_SCALE = 2.0**120
"""A larger one has a subnormal reciprocal."""

_LANE, _BLOCK = 0x9E3779B9, 0x9E3779B1  # 2^32 / golden ratio, and the nearest smaller number that is prime
_SECOND = 0x85EBCA6B
_LARGEST_CODE = 0x7E
_DROPPED = 23 - E4M3.mantissa_bits
_REBIASED = (127 - E4M3.bias) << E4M3.mantissa_bits
_SUBNORMAL = 1 << E4M3.mantissa_bits


def _signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits & (1 << 31) else bits


def mix(bits: Tensor) -> Tensor:
    """A hash of int32 to int32; C. Wellons' lowbias32, https://nullprogram.com/blog/2018/07/31/."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _signed(0x846CA68B)
    return bits ^ ((bits >> 16) & 0xFFFF)


def mix_int(bits: int) -> int:
    """`mix` of a number from 0 to 2^32 - 1."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ bits >> 16


def step_key(seed: int, step: int, position: int) -> int:
    """32 bits of the seed, the number of the step and the parameter's index in the optimizer."""
    key = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, step, position):
        key = mix_int((key + _BLOCK + word) & 0xFFFFFFFF)
    return key


def block_keys(key: Tensor, block: Tensor) -> Tensor:
    """int32 keys of blocks, from int32 keys of their parameters and their numbers in it, all [B]."""
    return mix(key + block * _signed(_BLOCK))


def random_bits(keys: Tensor) -> Tensor:
    """int32 [B, 256] of `block_keys` [B]."""
    lanes = torch.arange(BLOCK, dtype=torch.int32, device=keys.device) * _signed(_LANE)
    return mix(keys[:, None] + lanes)


def more_random_bits(bits: Tensor) -> Tensor:
    """Another int32 for each of `random_bits`."""
    return mix(bits ^ _signed(_SECOND))


def low16(bits: Tensor) -> Tensor:
    """The lower half of each integer's 32 bits."""
    return bits & 0xFFFF


def high16(bits: Tensor) -> Tensor:
    """The upper half of each integer's 32 bits."""
    return (bits >> 16) & 0xFFFF


def scales_of(amax: Tensor) -> tuple[Tensor, Tensor]:
    """quant_scale and scale of blocks with these amaxes, float32 [B]; float64 rounds alike on all devices."""
    quant = (E4M3.max / amax.double()).float().clamp(max=LARGEST_QUANT_SCALE)
    return quant, (1.0 / quant.double()).float()


def encode(blocks: Tensor, amax: Tensor, noise: Tensor, is_root: bool) -> tuple[Tensor, Tensor]:
    """float32 [B, 256] as e4m3 codes, and their scales.

    Args:
        amax: the largest magnitude of each block, float32 [B], finite.
        noise: int32 [B, 256], 0 to 65535.
        is_root: numbers above 0 become at least the smallest code.
    Returns:
        uint8 [B, 256] and float32 [B].
    """
    quant, scale = scales_of(amax)
    magnitude = blocks.abs() * quant[:, None]
    is_subnormal = magnitude < E4M3.smallest_normal
    lifted = torch.where(is_subnormal, magnitude + E4M3.smallest_normal, magnitude)
    code = ((lifted.view(torch.int32) + (noise << (_DROPPED - 16))) >> _DROPPED) - _REBIASED
    code = torch.where(is_subnormal, code - _SUBNORMAL, code).clamp(max=_LARGEST_CODE)
    if is_root:
        code = torch.maximum(code, (magnitude > 0).to(torch.int32))
    sign = (blocks.view(torch.int32) >> 24) & 0x80
    return (code | sign).to(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """uint8 [B, 256] and float32 [B] -> float32 [B, 256]."""
    return codes.view(E4M3.dtype).float() * scale[:, None]


def round_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """float32 as bfloat16; non-finite values stay what they are."""
    rounded = (values.view(torch.int32) + noise).bitwise_and(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
