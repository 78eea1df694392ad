"""A matmul that is exact up to float32 accumulation, for operands that hold float8 values.

    exact_mm(a, b, alpha, out_dtype) = RN(alpha * (a @ b))        a [M, K], b [K, N] -> [M, N] in out_dtype

The operands are bfloat16, or float32 that bfloat16 could hold. The product of two bfloat16 numbers is exact in float32,
so a machine's fast bfloat16 units lose nothing, and sums are kept in float32. The result is rounded once, after `alpha`.

It is an operation of its own because its two ways to get there cannot be written for a tracer: `alpha` reaches the CPU
library as a number, and float32 operands take the bfloat16 units only under a process-wide setting, held for the call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_library = torch.library.Library("quaver", "DEF")
_library.define("exact_mm(Tensor a, Tensor b, Tensor? alpha, ScalarType out_dtype) -> Tensor")


@torch.compiler.assume_constant_result
def has_bfloat16_units(device_type: str) -> bool:
    """Whether a bfloat16 matmul of this kind of device accumulates in float32 in hardware."""
    return _has_bfloat16_units(device_type)


@functools.cache
def _has_bfloat16_units(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def _float32_matmuls_on_bfloat16_units() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def exact_mm(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See the top of the file. `alpha` is a float32 tensor of one element, or None for 1."""
    if a.device.type == "cpu" and a.dtype is out_dtype is torch.bfloat16:
        out = a.new_empty(a.shape[0], b.shape[1])
        return torch.addmm(out, a, b, beta=0, alpha=1 if alpha is None else alpha.item(), out=out)
    out = _mm_to_float32(a, b)
    if alpha is not None:
        out.mul_(alpha)
    return out.to(out_dtype)


def _mm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cuda" and a.dtype is torch.bfloat16:
        # Asking for float32 also keeps cuBLAS from adding partial sums in bfloat16.
        return torch.mm(a, b, out_dtype=torch.float32)
    a, b = a.float(), b.float()
    if a.device.type == "cpu" and has_bfloat16_units("cpu"):
        with _float32_matmuls_on_bfloat16_units():
            return torch.mm(a, b)
    return torch.mm(a, b)


@torch.library.register_fake("quaver::exact_mm")
def _fake_exact_mm(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


_library.impl("exact_mm", exact_mm, "CompositeExplicitAutograd")
