"""A float8 matmul in C for CPUs whose AVX-512 multiplies bfloat16, one call; quaver/csrc/matmul.h says how.

    mm = RN(RN(RN(sum) * RN(a_dequant_scale * b_dequant_scale)) + bias)      a [M, K], b [K, N] -> [M, N]

The sum of an element runs over ascending k in float32, rounded at each step, in slabs of 2048 whose sums are added in
order. So it depends on its row of a and its column of b alone: not on layouts, not on other rows and columns, not on
threads; and its error grows with the number of slabs, not with K. Products of float8 numbers are exact. The result is
rounded once to the output dtype, ties to even. NaN and inf are what IEEE 754 makes of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.cpu import AVAILABLE, FLOAT8_KIND, HP_KIND, extension, is_plain, runs_directly

HAS_MM = AVAILABLE and bool(extension.has_mm())
"""Whether `mm` runs here: on CPUs with bfloat16 dot products in AVX-512, and no AMX, with which a library is faster."""
_THREADS_PAY_FROM = 1 << 21  # multiplications; about 20 us of work for one thread


def mm(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor | None:
    """The product, with the formula at the top of the file.

    Args:
        a, b: float8 [M, K] and [K, N], any strides; what has neither rows nor columns contiguous is copied first.
        a_dequant_scale, b_dequant_scale: float32; () or [M, 1], () or [1, N].
        bias: [N] in a high-precision dtype; or None.
        out_dtype: float32, bfloat16 or float16.
    Returns:
        [M, N]; None for what this does not multiply, and on other CPUs. See [Note: addresses] in cpu.py.
    Raises:
        ValueError: scales or a bias of another shape or dtype.
    """
    if not (HAS_MM and runs_directly() and is_plain(a) and is_plain(b) and (bias is None or is_plain(bias))):
        return None
    if not (a_dequant_scale.untyped_storage().nbytes() and b_dequant_scale.untyped_storage().nbytes()):
        return None  # freed; C refuses the other tensors that are not plain, whose address is 0
    (m, k), n = a.shape, b.shape[1]
    if a.dtype not in FLOAT8_KIND or b.dtype not in FLOAT8_KIND or out_dtype not in HP_KIND or b.shape[0] != k:
        return None
    for scale, shape in ((a_dequant_scale, (m, 1)), (b_dequant_scale, (1, n))):
        if scale.dtype is not torch.float32 or (scale.dim() != 0 and scale.shape != shape):
            raise ValueError(f"expected a float32 scale of () or {shape}, got {scale.dtype} of {list(scale.shape)}")
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"expected a bias of [{n}], got {list(bias.shape)}")
        bias = bias.to(torch.float32).contiguous()
    a, b = (codes if 1 in codes.stride() else codes.clone(memory_format=torch.contiguous_format) for codes in (a, b))
    a_dequant_scale, b_dequant_scale = a_dequant_scale.contiguous(), b_dequant_scale.contiguous()
    out = a.new_empty(m, n, dtype=torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32)
    extension.mm(
        out.data_ptr(),
        *(a.data_ptr(), FLOAT8_KIND[a.dtype], *a.stride(), a_dequant_scale.data_ptr(), a_dequant_scale.dim() > 0),
        *(b.data_ptr(), FLOAT8_KIND[b.dtype], *b.stride()[::-1], b_dequant_scale.data_ptr(), b_dequant_scale.dim() > 0),
        *(m, k, n, HP_KIND[out.dtype], 0 if bias is None else bias.data_ptr()),
        1 if m * k * n < _THREADS_PAY_FROM else torch.get_num_threads(),
    )
    return out if out.dtype is out_dtype else out.to(out_dtype)
