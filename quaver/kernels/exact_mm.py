"""A float8 matmul that is exact up to float32 accumulation, on any device.

    exact_float8_mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)
        = RN((a * a_dequant_scale) @ (b * b_dequant_scale)) + bias       a [M, K], b [K, N] -> [M, N] in out_dtype

Every float8 value is a bfloat16 value, and the product of two bfloat16 numbers is exact in float32. So the operands are
widened and multiplied on the machine's bfloat16 units, which lose nothing, and sums are kept in float32.

It is one operation to a compiler, as the hardware's float8 matmul is. The compiler then keeps the float8 operand for
backward, as on a GPU; were the widening visible, it would keep the widened one, which is twice the size. Two steps
could not be written for a tracer in any case: the scale that reaches the CPU library as a number, and the process-wide
setting under which float32 operands take the bfloat16 units.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quaver.kernels.widen import widen

UNITS_PAY_FROM = 8192
"""Elements of the larger operand from which a CPU's bfloat16 units beat float32: they take microseconds to start."""


@functools.cache
def has_bfloat16_units(device_type: str) -> bool:
    """Whether a bfloat16 matmul of this kind of device accumulates in float32 in hardware."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def exact_float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
) -> Tensor:
    """See the top of the file, and `quaver.gemm.float8_mm` for the arguments."""
    # bfloat16 operands leave room for one scale of the whole result, or for scales that change no mantissa.
    tensorwise = a_dequant_scale.dim() == 0 and b_dequant_scale.dim() == 0
    if (tensorwise or scales_are_powers_of_2) and _bfloat16_pays(a, b, out_dtype):
        a_hp, a_alpha = _fold_rowwise(widen(a, torch.bfloat16), a_dequant_scale)
        b_hp, b_alpha = _fold_rowwise(widen(b, torch.bfloat16), b_dequant_scale)
        out = _bfloat16_mm(a_hp, b_hp, _product(a_alpha, b_alpha), out_dtype)
        return out if bias is None else out.add_(bias)
    out = _float32_mm(widen(a, torch.float32), widen(b, torch.float32))
    out.mul_(a_dequant_scale).mul_(b_dequant_scale)
    if bias is not None:
        out.add_(bias)
    return out.to(out_dtype)


def _bfloat16_pays(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether bfloat16 operands give this result, and sooner than float32 ones."""
    if not has_bfloat16_units(a.device.type):
        return False
    return a.is_cuda or (out_dtype is torch.bfloat16 and max(a.numel(), b.numel()) >= UNITS_PAY_FROM)


def _fold_rowwise(wide: Tensor, dequant_scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Multiply power-of-two row scales into the operand, which is exact; leave a tensor's single scale for later."""
    if dequant_scale.dim() == 0:
        return wide, dequant_scale
    return wide.mul_(dequant_scale.to(wide.dtype)), None


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


# The matmuls below write into `out`, because autocast would give a plain torch.mm other operands.


def _bfloat16_mm(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """RN(alpha * (a @ b)): one rounding of the float32 sum. a and b are bfloat16."""
    if a.is_cpu:  # here out_dtype is bfloat16, and the library scales its float32 sums by a number
        out = a.new_empty(a.shape[0], b.shape[1])
        return torch.addmm(out, a, b, beta=0, alpha=1 if alpha is None else alpha.item(), out=out)
    # Asking for float32 also keeps cuBLAS from adding partial sums in bfloat16.
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
    torch.mm(a, b, out_dtype=torch.float32, out=out)
    return (out if alpha is None else out.mul_(alpha)).to(out_dtype)


def _float32_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, on bfloat16 units where a CPU has them: the operands are bfloat16 numbers."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.is_cpu and max(a.numel(), b.numel()) >= UNITS_PAY_FROM and has_bfloat16_units("cpu"):
        with _float32_matmuls_on_bfloat16_units():
            return torch.mm(a, b, out=out)
    return torch.mm(a, b, out=out)


@contextmanager
def _float32_matmuls_on_bfloat16_units() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


_library = torch.library.Library("quaver", "DEF")
_library.define(
    "exact_float8_mm(Tensor a, Tensor b, Tensor a_dequant_scale, Tensor b_dequant_scale, Tensor? bias, "
    "ScalarType out_dtype, bool scales_are_powers_of_2) -> Tensor"
)
_library.impl("exact_float8_mm", exact_float8_mm, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::exact_float8_mm")
def _fake_exact_float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
