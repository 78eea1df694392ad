"""e2m1 in blocks of 1 x 16: four bits an element, scales in e4m3 under one float32 (NVFP4's format).

    outer_scale    = RN32(amax of the tensor / (448 * 6)); 1 for a tensor of zeros
    dequant_scale  = RNE8(clamp(RN32(RN32(amax of the block / 6) / outer_scale), 2^-9, 448))        e4m3
    quant_scale    = RN32(1 / RN32(dequant_scale * outer_scale))                                    float32
    code           = RNE4(clamp(RN32(float32(hp) * quant_scale), -6, 6)), its sign above three bits
    value          = code * dequant_scale * outer_scale

Codes have no inf and no NaN. A non-finite amax makes the outer_scale inf or NaN, and every value NaN. Two codes share a
byte, the first in its lower half. The two codes of a byte are neighbors in a row of the matrix, in row codes and in
column codes. So a shard may begin at any row. e4m3 holds every value of a code, so `unpack` returns e4m3.

Codes and scales are bit-identical to torchao's (prototype.mx_formats.nvfp4_tensor), unless a block needs a scale below
2^-6. There torchao uses 2^-6, and this file uses the subnormal numbers of e4m3. NVIDIA's recipe (arXiv 2509.25149)
has these two levels of scales; no recipe here uses the format yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.recipes.formats import E2M1, E4M3
from quaver.torch_private.tracing import assume_constant_result

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the codes 0 to 7."""


# [Note: floats under dynamic shapes] in scaling.py.
@assume_constant_result
def _get_limits() -> tuple[float, float, float]:
    """Return the largest code, the smallest scale and the largest scale."""
    return E2M1.max, E4M3.smallest_subnormal, E4M3.max


@assume_constant_result
def _get_midpoints() -> tuple[tuple[float, bool], ...]:
    """Return the midpoints between adjacent magnitudes, and whether each rounds up: to the even code."""
    return (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)


def compute_block_scales(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the quant_scale, dequant_scale and outer_scale of a tensor from the amaxes of its blocks.

    Args:
        amax: the amaxes of all blocks, any shape, in a high-precision dtype.
    Returns:
        float32 and float8_e4m3fn of amax's shape; float32 ().
    """
    amax = amax.float()
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    max_code, min_scale, max_scale = _get_limits()
    outer = torch.where(largest == 0, 1.0, _divide(largest, max_scale * max_code))
    dequant = _divide(_divide(amax, max_code), outer).clamp(min_scale, max_scale).to(E4M3.dtype)
    return _divide(torch.ones_like(amax), dequant.float() * outer), dequant, outer


def _divide(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Divide to float32, with the same bits on every device; see [Note: one division, two formulas] in scaling.py."""
    return (numerator.double() / denominator).float()


def pack(scaled: Tensor) -> Tensor:
    """Round float32 [..., columns] to codes [..., columns / 2], two per byte; NaN becomes 0. `columns` is even."""
    if scaled.shape[-1] % 2:
        raise ValueError(f"codes of four bits share a byte: expected rows of an even length, got {list(scaled.shape)}")
    magnitude = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for midpoint, rounds_up in _get_midpoints():
        code += (magnitude >= midpoint) if rounds_up else (magnitude > midpoint)
    code |= (scaled.signbit() & ~scaled.isnan()).to(torch.uint8) << 3
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(E2M1.dtype)


def unpack(codes: Tensor) -> Tensor:
    """Return the values of codes [..., n] as float8_e4m3fn [..., 2 n], which is exact."""
    signed = [*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)]
    values = torch.tensor(signed, dtype=torch.float32, device=codes.device).to(E4M3.dtype)
    pairs = codes.view(torch.uint8)
    indices = torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(-2)
    return values.view(torch.uint8)[indices.int()].view(E4M3.dtype)
