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

from quaver.kernels import cpu
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
    """See the top of the file, and `quaver.gemm.float8_mm` for the arguments. Runs on plain tensors, never traced."""
    if bias is None and a.is_cpu and cpu.takes_small_mm(a, b, out_dtype):
        return cpu.small_mm(a, b, a_dequant_scale, b_dequant_scale, out_dtype)
    # bfloat16 operands leave room for one scale of the whole result, or for scales that change no mantissa.
    tensorwise = a_dequant_scale.dim() == 0 and b_dequant_scale.dim() == 0
    bfloat16 = (tensorwise or scales_are_powers_of_2) and _bfloat16_pays(a, b, out_dtype)
    wide = torch.bfloat16 if bfloat16 else torch.float32
    a_hp, a_left = _widen_operand(a, a_dequant_scale, wide, scales_are_powers_of_2)
    b_hp, b_left = _widen_operand(b, b_dequant_scale, wide, scales_are_powers_of_2)
    if bfloat16:
        out = _bfloat16_mm(a_hp, b_hp, _product(a_left, b_left), out_dtype)
        return out if bias is None else out.add_(bias)
    out = _float32_mm(a_hp, b_hp)
    for scale in (a_left, b_left):
        if scale is not None:
            out.mul_(scale)
    if bias is not None:
        out.add_(bias)
    return out.to(out_dtype)


def _bfloat16_pays(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether bfloat16 operands give this result, and sooner than float32 ones."""
    if not has_bfloat16_units(a.device.type):
        return False
    return a.is_cuda or (out_dtype is torch.bfloat16 and max(a.numel(), b.numel()) >= UNITS_PAY_FROM)


def _widen_operand(
    codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype, scales_are_powers_of_2: bool
) -> tuple[Tensor, Tensor | None]:
    """The operand, times its row scales where that is exact, and the scale that is left for the result."""
    if scales_are_powers_of_2 and dequant_scale.dim():
        return widen(codes, dtype, dequant_scale), None
    return widen(codes, dtype), dequant_scale


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


_library = torch.library.Library("quaver", "FRAGMENT")
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
