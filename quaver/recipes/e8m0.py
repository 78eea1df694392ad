"""The E8M0 scales of MXFP8: powers of two from 2^-127 to 2^127 or NaN, stored as the biased exponent.

RCEIL    dequant_scale = the smallest power of two >= RN32(amax / format.max)
FLOOR    dequant_scale = 2^(floor(log2 amax) - floor(log2 format.max)); elements may saturate
both     0 and amaxes below the range: 2^-127; inf and NaN: NaN, and every result of the block is NaN
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.recipes.formats import FLOAT8_FORMATS, FLOAT32_MANTISSA_MASK, get_float32_bits
from quaver.torch_private.tracing import assume_constant_result

_NAN_BITS = 0x7FC00000


@assume_constant_result
def compute_bits_offset(float8_dtype: torch.dtype, rule: str) -> int:
    """Return the integer to add to the bits of a float32 amax. Clearing the mantissa then gives the dequant_scale.

    RCEIL carries into the exponent if the amax has a larger mantissa than the format's maximum.
    """
    largest = get_float32_bits(FLOAT8_FORMATS[float8_dtype].max)
    carry = FLOAT32_MANTISSA_MASK - (largest & FLOAT32_MANTISSA_MASK) if rule == "rceil" else 0
    return int(carry - (((largest >> 23) - 127) << 23))


def compute_scales(amax: Tensor, float8_dtype: torch.dtype, rule: str) -> tuple[Tensor, Tensor]:
    """Compute quant_scales and dequant_scales by the rule "rceil" or "floor", as float32 powers of two or NaN.

    `amax`: a high-precision dtype, any shape.
    """
    amax = amax.float()
    bits = amax.view(torch.int32) + compute_bits_offset(float8_dtype, rule)
    dequant = bits.bitwise_and_(~FLOAT32_MANTISSA_MASK).clamp_(min=0)
    quant = (254 << 23) - dequant
    dequant.clamp_(min=1 << 22)  # the bits of 2^-127, a subnormal number
    # NaN as an integer constant: a compiler merges the equal casts of q, k and v only if their constants compare equal.
    is_finite = amax < torch.inf
    quant, dequant = (torch.where(is_finite, bits, _NAN_BITS).view(torch.float32) for bits in (quant, dequant))
    return quant, dequant
