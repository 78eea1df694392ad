"""float8 -> bfloat16 or float32, exactly.

Every float8 value is a bfloat16 value, so widening is a table. Eager PyTorch converts float8 one element at a time on a
CPU (5 ms for 1024 x 1024 on one thread); a table of all pairs of codes, indexed by 16-bit loads, takes 0.7 ms. Compiled
code vectorises the plain conversion, which is also the reference: `codes.to(dtype)`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quaver.scaling import runs_eagerly_on_cpu

_TABLE_PAYS_FROM = 8192  # elements; below, the plain conversion costs less than the table's extra calls
_PAIR_STORAGE = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}


def widen(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The float8 values of `codes` in `dtype`, NaN and inf included.

    Args:
        codes: float8, any shape.
        dtype: float32, bfloat16 or float16 (where e5m2fnuz may round).
    Returns:
        `dtype`, same shape; strides are kept where they are dense.
    """
    if codes.numel() < _TABLE_PAYS_FROM or codes.numel() % 2 or not runs_eagerly_on_cpu(codes):
        return codes.to(dtype)
    if codes.dim() == 2 and codes.stride(0) == 1 and codes.t().is_contiguous():
        return _widen_contiguous(codes.t(), dtype).t()
    return _widen_contiguous(codes.contiguous(), dtype)


def _widen_contiguous(codes: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = codes.view(-1).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return _pair_table(codes.dtype, dtype).index_select(0, pairs).view(dtype).view(codes.shape)


@functools.cache
def _pair_table(float8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Entry i holds the values of bytes i % 256 and i // 256, in memory order; one integer per entry."""
    value = torch.arange(256, dtype=torch.uint8).view(float8_dtype).to(dtype)
    second, first = torch.meshgrid(value, value, indexing="ij")
    return torch.stack([first, second], dim=-1).view(_PAIR_STORAGE[dtype]).view(-1)
