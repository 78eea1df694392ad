"""A float8 matmul that is exact up to float32 accumulation, on any device.

    exact_float8_mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)
        = RN((a * a_dequant_scale) @ (b * b_dequant_scale)) + bias       a [M, K], b [K, N] -> [M, N] in out_dtype

Every float8 value is a bfloat16 value, and the product of two bfloat16 numbers is exact in float32. So the operands are
widened and multiplied on the machine's bfloat16 units, which lose nothing, and sums are kept in float32. On CPUs for
which quaver has a matmul of its own (`cpu.mm`), that computes it all; what follows is for every other device.

It is one operation to a compiler, as the hardware's float8 matmul is. The compiler then saves the float8 operand for
backward, as on a GPU; were the widening visible, it would save the widened one, which is twice the size.

[Note: scales along the contracted dim] The scales of blocks, and the row scales of a weight whose rows are contracted,
differ from term to term of a sum. They are multiplied into the widened operand: exactly in bfloat16 if they are
powers of two; else in float32, rounded once per element, and the matmul takes float32 operands.

[Note: panels] Native float8 matmuls widen nothing, so what is widened here is memory that only this stand-in takes. On
a CPU, therefore, only the smaller operand is widened as a whole. The larger one is widened in panels of about a
thousand rows (or columns of b), each multiplied at once into its part of the result. No sum is split, so every element
of the result is the same sum as in one matmul; and where sums are float32, only a panel's are alive at a time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quaver.kernels import cpu
from quaver.kernels.operands import Operand, present
from quaver.kernels.operation import operation
from quaver.kernels.widen import widen
from quaver.recipes import e2m1
from quaver.recipes.formats import E2M1
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scaling import multiply_scale_
from quaver.runtime.devices import compute_capability, is_cpu, is_cuda, is_cuda_device
from quaver.torch_private.hardware import has_avx512_bfloat16, onednn_has_bfloat16

UNITS_PAY_FROM = 8192
"""Elements of the largest matrix from which a CPU's bfloat16 units beat float32: they take microseconds to start."""

CALLS_WEIGH_BELOW = 4096
"""Elements of the largest matrix below which the calls of a matmul on a CPU take longer than its arithmetic."""

PANEL_LENGTH = 1024
"""Rows or columns of the larger operand that are widened at a time on a CPU, at least half as many."""

PANEL_ELEMENTS = 1 << 19
"""And elements, likewise: with fewer, starting a matmul weighs more than its memory."""


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether this kind of device multiplies bfloat16 numbers and accumulates in float32 in hardware."""
    if is_cuda_device(device):
        return torch.version.hip is not None or compute_capability(device.index) >= (8, 0)
    return device.type == "cpu" and _cpu_has_bfloat16_units()


@functools.cache
def _cpu_has_bfloat16_units() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        # mkldnn says yes to AVX-512 alone, where it does so in three times the time of float32
        return has_avx512_bfloat16()
    return onednn_has_bfloat16()


def _exact_float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
    a_layout: Sequence[int],
    b_layout: Sequence[int],
    a_outer_scale: Tensor | None = None,
    b_outer_scale: Tensor | None = None,
) -> Tensor:
    """See the top of the file, and `linear.gemm.float8_mm` for the arguments. Runs on plain tensors, never traced."""
    a_operand = Operand(a, a_dequant_scale, ScaleLayout(*a_layout), None, a_outer_scale)
    b_operand = Operand(b, b_dequant_scale, ScaleLayout(*b_layout), None, b_outer_scale)
    return _multiply(unpacked(a_operand), unpacked(b_operand), bias, out_dtype, scales_are_powers_of_2, None)


def exact_float8_mm_into(out: Tensor, a: Operand, b: Operand, scales_are_powers_of_2: bool) -> None:
    """Write `exact_float8_mm` into contiguous rows [M, N]. On plain tensors alone, inside of another operation."""
    tensors = a.data, b.data, present(a.dequant_scale), present(b.dequant_scale)
    rest = None, out.dtype, scales_are_powers_of_2
    made = _cpu_mm(*tensors, *rest, a.layout, b.layout) if is_cpu(a.data) else None
    if made is None:
        _multiply(a, b, *rest, out)
    else:
        out.copy_(made)


def _multiply(
    a_operand: Operand,
    b_operand: Operand,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
    out: Tensor | None,
) -> Tensor:
    """Into `out`, or new memory."""
    a, b, layouts = a_operand.data, b_operand.data, (a_operand.layout, b_operand.layout)
    varies = a_operand.varies_along(1), b_operand.varies_along(0)
    if is_cpu(a) and _largest(a, b) < CALLS_WEIGH_BELOW:
        folded = [
            each or (scales_are_powers_of_2 and not layout.is_tensorwise)
            for each, layout in zip(varies, layouts, strict=True)
        ]
        small = _small_mm((a_operand, b_operand), folded, bias, out_dtype)
        return small if out is None else out.copy_(small)
    # bfloat16 operands leave room for one scale of the whole result, or for scales that change no mantissa.
    tensorwise = layouts[0].is_tensorwise and layouts[1].is_tensorwise
    bfloat16 = (tensorwise or scales_are_powers_of_2) and _bfloat16_pays(a, b, out_dtype)
    wide = torch.bfloat16 if bfloat16 else torch.float32
    multiply = _bfloat16_mm if bfloat16 else _float32_mm
    dim = 0 if a.numel() >= b.numel() else 1  # of the larger operand, and of the result
    larger, smaller = (b_operand, a_operand) if dim else (a_operand, b_operand)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype) if out is None else out
    whole = _widened(smaller, wide, scales_are_powers_of_2, varies[1 - dim])
    for start, length in _panels(larger.data, dim, larger.layout[dim] or 1):
        panel = _widened(larger.part(dim, start, length), wide, scales_are_powers_of_2, varies[dim])
        panel_bias = bias.narrow(0, start, length) if dim and bias is not None else bias
        operands = (whole, panel) if dim else (panel, whole)
        multiply(*operands, panel_bias, out.narrow(dim, start, length))
        del panel, operands  # before the next is widened
    return out


def _largest(a: Tensor, b: Tensor) -> int:
    """Elements of the largest matrix of a matmul: few rows of an expert still make a whole gradient of its weight."""
    return max(a.numel(), b.numel(), a.shape[0] * b.shape[1])


def _bfloat16_pays(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether bfloat16 operands give this result, and sooner than float32 ones."""
    if not has_bfloat16_units(a.device):
        return False
    return is_cuda(a) or (out_dtype is torch.bfloat16 and _largest(a, b) >= UNITS_PAY_FROM)


def unpacked(operand: Operand) -> Operand:
    """An operand of codes of four bits as one of e4m3, which has all of their values; others as they are."""
    codes, dequant_scale, layout, _, outer_scale = operand
    if not layout.is_packed:
        return operand
    codes = e2m1.unpack(codes.t()).t() if layout.rows_of_byte > 1 else e2m1.unpack(codes)
    scale = present(dequant_scale).float()
    return Operand(codes, scale, ScaleLayout(layout.rows, layout.columns), None, outer_scale)


class _Wide(NamedTuple):
    """An operand in bfloat16 or float32, and the scale that is left for the result."""

    data: Tensor
    scale_left: Tensor | None


def _widened(operand: Operand, dtype: torch.dtype, scales_are_powers_of_2: bool, varies: bool) -> _Wide:
    """Times the scales where they vary along the contracted dim, and the row scales where that is exact."""
    codes, dequant_scale, layout, _, outer_scale = operand
    if varies or (scales_are_powers_of_2 and not layout.is_tensorwise):
        return _Wide(widen(codes, dtype, dequant_scale, layout), outer_scale)
    return _Wide(widen(codes, dtype), dequant_scale)


def _panels(codes: Tensor, dim: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Start, a multiple of `multiple`, and length of the parts to widen at a time ([Note: panels]), nearly equal."""
    length = codes.shape[dim]
    longest = max(PANEL_LENGTH, PANEL_ELEMENTS * length // max(codes.numel(), 1))
    if length <= longest or not is_cpu(codes):
        return [(0, length)]
    count = -(-length // longest)
    ends = [*(length * i // count // multiple * multiple for i in range(count)), length]
    return [(start, stop - start) for start, stop in zip(ends, ends[1:], strict=False)]


def _scales_of_sums(a_scale: Tensor | None, b_scale: Tensor | None) -> list[Tensor]:
    """Returns the factors of the sums: the product of two tensorwise scales, else each scale.

    The product is finite where the result is. A sum times one scale may not be, as with an amax of 1e36.
    """
    if a_scale is not None and b_scale is not None and a_scale.dim() == b_scale.dim() == 0:
        return [a_scale * b_scale]
    return [scale for scale in (a_scale, b_scale) if scale is not None]


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


# The matmuls below write into a tensor, because autocast would give a plain torch.mm other operands.
def _bfloat16_mm(a: _Wide, b: _Wide, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = RN(alpha * (a @ b)) + bias, with one rounding of the float32 sum; alpha is what is left of the scales."""
    alpha = _product(a.scale_left, b.scale_left)
    if is_cpu(out):  # here out is bfloat16, and the library scales its float32 sums by a number
        torch.addmm(out, a.data, b.data, beta=0, alpha=1 if alpha is None else alpha.item(), out=out)
    else:
        # Asking for float32 also keeps cuBLAS from adding partial sums in bfloat16.
        sums = torch.empty_like(out, dtype=torch.float32)
        torch.mm(a.data, b.data, out_dtype=torch.float32, out=sums)
        out.copy_(sums if alpha is None else sums.mul_(alpha))
    return out if bias is None else out.add_(bias)


def _float32_mm(a: _Wide, b: _Wide, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = RN(scales * (a @ b) + bias), in float32 up to the end."""
    sums = out if out.dtype is torch.float32 and out.is_contiguous() else torch.empty_like(out, dtype=torch.float32)
    torch.mm(a.data, b.data, out=sums)
    for scale in _scales_of_sums(a.scale_left, b.scale_left):
        sums.mul_(scale)
    if bias is not None:
        sums.add_(bias)
    return out if sums is out else out.copy_(sums)


def _small_mm(
    operands: tuple[Operand, Operand],
    folded: list[bool],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The bits of `_float32_mm` on widened operands, in the fewest calls; `folded`: which scales to multiply in."""
    a, b = (
        multiply_scale_(each.data.float(), present(each.dequant_scale), each.layout) if fold else each.data.float()
        for each, fold in zip(operands, folded, strict=True)
    )
    sums = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=sums)
    left = (each.outer_scale if fold else each.dequant_scale for each, fold in zip(operands, folded, strict=True))
    for scale in _scales_of_sums(*left):
        sums.mul_(scale)
    if bias is not None:
        sums.add_(bias)
    return sums.to(out_dtype)


def _cpu_mm(a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, *rest: Any) -> Tensor | None:
    bias, out_dtype, _, a_layout, b_layout, *_ = rest
    if E2M1.dtype in (a.dtype, b.dtype):
        return None
    if ScaleLayout(*a_layout).varies_along(1, a.shape) or ScaleLayout(*b_layout).varies_along(0, b.shape):
        return None
    return cpu.mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)


def _fake_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    _, _, _, out_dtype, _, a_layout, b_layout, *_ = rest
    rows, columns = ScaleLayout(*a_layout).size_of(a)[0], ScaleLayout(*b_layout).size_of(b)[1]
    return a.new_empty(rows, columns, dtype=out_dtype)


exact_float8_mm = operation(_exact_float8_mm, results=1, cpu=_cpu_mm, fake=_fake_mm, in_graphs=True)


@register_flop_formula(torch.ops.quaver.exact_float8_mm)
def flops(a_shape: torch.Size, b_shape: torch.Size, *_: object, **__: object) -> int:
    """As torch counts aten._scaled_mm: FlopCounterMode reads it, and the compiler for its activation memory budget."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]
