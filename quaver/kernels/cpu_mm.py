"""Float8 matmuls in C on a CPU, one call each: small ones anywhere, others where AVX-512 multiplies bfloat16.

    small_mm, mm = RN(RN(RN(sum) * RN(a_dequant_scale * b_dequant_scale)) + bias)      a [M, K], b [K, N] -> [M, N]

The sum of an element runs over ascending k in float32, and is rounded at each step. So it depends on its row of a and
its column of b alone: not on layouts, not on other rows and columns, not on threads, and not on which of the two it is.
Products of float8 numbers are exact. The result is rounded once to the output dtype, ties to even. NaN and inf are
what IEEE 754 makes of them.

`mm` packs float8 codes into panels of bfloat16 in the cache (quaver/csrc/matmul.h says how), where a library's matmul
needs whole operands in bfloat16, which it packs once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.cpu import AVAILABLE, FLOAT8_KIND, HP_KIND, extension

HAS_MM = AVAILABLE and bool(extension.has_mm())
"""Whether `mm` runs here: on CPUs with bfloat16 dot products in AVX-512, and no AMX, with which a library is faster."""

SMALL_MATMUL = 1 << 15
"""Multiplications up to which `small_mm` takes less time than one call of a library: about 5 us."""

_THREADS_PAY_FROM = 1 << 21  # multiplications; about 20 us of work for one thread


def takes_small_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `small_mm` takes these float8 matrices [M, K] and [K, N], plain ones on a CPU, and gains by it."""
    return (
        AVAILABLE
        and a.numel() * b.shape[1] <= SMALL_MATMUL
        and a.dtype in FLOAT8_KIND
        and b.dtype in FLOAT8_KIND
        and (out_dtype is torch.bfloat16 or out_dtype is torch.float32)
    )


def small_mm(a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See the top of the file.

    Args:
        a, b: float8 [M, K] and [K, N], any strides.
        a_dequant_scale, b_dequant_scale: float32, contiguous; () or [M, 1], () or [1, N].
        out_dtype: float32 or bfloat16.
    """
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n, dtype=out_dtype)
    extension.small_mm(
        out.data_ptr(),
        a.data_ptr(),
        FLOAT8_KIND[a.dtype],
        *a.stride(),
        a_dequant_scale.data_ptr(),
        a_dequant_scale.dim(),
        b.data_ptr(),
        FLOAT8_KIND[b.dtype],
        *b.stride(),
        b_dequant_scale.data_ptr(),
        b_dequant_scale.dim(),
        m,
        k,
        n,
        HP_KIND[out_dtype],
    )
    return out


def takes_mm(a: Tensor, b: Tensor) -> bool:
    """Whether `mm` takes these float8 matrices [M, K] and [K, N], plain ones."""
    return (
        HAS_MM
        and a.is_cpu
        and b.is_cpu
        and a.dtype in FLOAT8_KIND
        and b.dtype in FLOAT8_KIND
        and a.shape[1] == b.shape[0]
    )


def mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See the top of the file; ask `takes_mm` first.

    It packs into memory of its own: up to 512 lines (rows of a or columns of b) of the smaller operand, more if they
    are short, and 64 of the larger one for each thread, as bfloat16.

    Args:
        a, b: float8 [M, K] and [K, N], any strides; what has neither rows nor columns contiguous is copied first.
        a_dequant_scale, b_dequant_scale: float32; () or [M, 1], () or [1, N].
        bias: [N] in a high-precision dtype; or None.
        out_dtype: float32, bfloat16 or float16.
    Raises:
        ValueError: a bias of another shape.
    """
    (m, k), n = a.shape, b.shape[1]
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"expected a bias of [{n}], got {list(bias.shape)}")
        bias = bias.to(torch.float32).contiguous()
    a, b = _with_lines(a), _with_lines(b)
    a_dequant_scale, b_dequant_scale = a_dequant_scale.contiguous(), b_dequant_scale.contiguous()
    threads = 1 if m * k * n < _THREADS_PAY_FROM else torch.get_num_threads()
    out = a.new_empty(m, n, dtype=out_dtype)
    room = a.new_empty(extension.mm_room(m, k, n, threads), dtype=torch.uint8)
    extension.mm(
        out.data_ptr(),
        a.data_ptr(),
        FLOAT8_KIND[a.dtype],
        *a.stride(),
        a_dequant_scale.data_ptr(),
        a_dequant_scale.dim(),
        b.data_ptr(),
        FLOAT8_KIND[b.dtype],
        b.stride(1),
        b.stride(0),
        b_dequant_scale.data_ptr(),
        b_dequant_scale.dim(),
        m,
        k,
        n,
        HP_KIND[out_dtype],
        0 if bias is None else bias.data_ptr(),
        threads,
        room.data_ptr(),
    )
    return out


def _with_lines(codes: Tensor) -> Tensor:
    """`codes`, copied if neither of their strides is 1."""
    return codes if 1 in codes.stride() else codes.contiguous()
