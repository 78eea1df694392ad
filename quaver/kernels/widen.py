"""Converts float8 to bfloat16 or float32 exactly, and multiplies by a scale, which is exact for powers of two.

The reference is `codes.to(dtype) * scale.to(dtype)`. On a CPU the C extension is faster. Without the extension, a table
of all pairs of codes is faster, too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.recipes.scale_layout import TENSORWISE, ScaleLayout
from quaver.recipes.scaling import multiply_scale_
from quaver.runtime.devices import is_cpu

_MIN_TABLE_ELEMENTS = 8192  # elements; below, the plain conversion costs less than the table's extra calls
_SMALLEST_EXACT_SCALE = 2.0**-110  # for bfloat16 products computed by C
_PAIR_STORAGE = {torch.bfloat16: torch.int32, torch.float32: torch.int64}


def widen(codes: Tensor, dtype: torch.dtype, scale: Tensor | None = None, layout: ScaleLayout = TENSORWISE) -> Tensor:
    """Convert float8 `codes` [rows, columns], any strides, to bfloat16 or float32, NaN and inf included.

    `scale`: float32 of `layout`, a factor of the result. For bfloat16, powers of two, so that products are exact. The
    result is column-major if `codes` is, or is a view of a column-major matrix.
    """
    if is_cpu(codes):
        if codes.stride(1) != 1 and codes.stride(0) == 1:
            return widen(codes.t(), dtype, None if scale is None else scale.t(), layout.t()).t()
        # C truncates a bfloat16 product that is subnormal.
        if scale is None or dtype is torch.float32 or not (scale < _SMALLEST_EXACT_SCALE).any():
            wide = cpu.widen(codes, dtype, None if scale is None else scale.contiguous(), layout)
            if wide is not None:
                return wide
        if codes.numel() >= _MIN_TABLE_ELEMENTS and codes.numel() % 2 == 0:
            looked_up = _widen_by_table(codes.contiguous(), dtype)
            return looked_up if scale is None else multiply_scale_(looked_up, scale.to(dtype), layout)
    wide = codes.to(dtype)
    return wide if scale is None else multiply_scale_(wide, scale.to(dtype), layout)


def _widen_by_table(codes: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = codes.view(-1).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return make_pair_table(codes.dtype, dtype).index_select(0, pairs).view(dtype).view(codes.shape)


@functools.cache
def make_pair_table(float8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Make a table whose entry i holds the values of bytes i % 256 and i // 256, in memory order, as one integer."""
    value = torch.arange(256, dtype=torch.uint8, device="cpu").view(float8_dtype).to(dtype)
    second, first = torch.meshgrid(value, value, indexing="ij")
    return torch.stack([first, second], dim=-1).view(_PAIR_STORAGE[dtype]).view(-1)
