"""The float8 formats: their range, precision and special codes.

Sources:

- e4m3 and e5m2: arXiv 2209.05433, table 1, and the OCP 8-bit floating point specification. NVIDIA and AMD MI350
  multiply these two.
- the `fnuz` variants: arXiv 2206.02915. AMD MI300 multiplies these.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

HP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The high-precision dtypes that quaver casts from and multiplies into."""

FLOAT32_MANTISSA_MASK = (1 << 23) - 1
"""The bits of the mantissa in a float32."""


@dataclass(frozen=True)
class Float8Format:
    """A floating point format of 8 or 4 bits.

    `max`, the largest finite value, is given because formats use their top codes differently; the other limits follow
    from the field widths. `nan_codes` and `infinity_codes` are bytes.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan_codes: tuple[int, ...]
    infinity_codes: tuple[int, ...] = ()
    bits: int = 8

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def saturates_above(self) -> float:
        """Half a unit in the last place above `max`; larger magnitudes count as saturated.

        Clamping them changes them by more than rounding would in a format without a maximum.
        """
        exponent = math.frexp(self.max)[1] - 1
        return self.max + 2.0 ** (exponent - self.mantissa_bits - 1)

    @property
    def max_relative_error(self) -> float:
        """The largest relative rounding error of a value in the normal range: half a unit in the last place."""
        return 2.0 ** -(self.mantissa_bits + 1)


E4M3 = Float8Format("e4m3", torch.float8_e4m3fn, 4, 3, 7, 448.0, nan_codes=(0x7F, 0xFF))
E5M2 = Float8Format("e5m2", torch.float8_e5m2, 5, 2, 15, 57344.0, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC))
E4M3_FNUZ = Float8Format("e4m3fnuz", torch.float8_e4m3fnuz, 4, 3, 8, 240.0, nan_codes=(0x80,))
E5M2_FNUZ = Float8Format("e5m2fnuz", torch.float8_e5m2fnuz, 5, 2, 16, 57344.0, nan_codes=(0x80,))

E2M1 = Float8Format("e2m1", torch.float4_e2m1fn_x2, 2, 1, 1, 6.0, nan_codes=(), bits=4)

FLOAT8_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}


def get_format(dtype: torch.dtype) -> Float8Format:
    """Return the format of `dtype`. Raises ValueError for other dtypes."""
    try:
        return E2M1 if dtype is E2M1.dtype else FLOAT8_FORMATS[dtype]
    except KeyError:
        names = ", ".join(str(float8_dtype) for float8_dtype in FLOAT8_FORMATS)
        raise ValueError(f"expected a float8 dtype ({names}), got {dtype}") from None


def get_float32_bits(number: float) -> int:
    """Return the bits of a float32 number."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def round_to_float32(number: float) -> float:
    """Round `number` to float32."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])
