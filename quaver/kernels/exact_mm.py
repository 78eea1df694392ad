"""A float8 matmul for devices without float8 units: exact up to float32 accumulation.

    exact_float8_mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)
        = RN((a * a_dequant_scale) @ (b * b_dequant_scale)) + bias       with operands in bfloat16
        = RN((a * a_dequant_scale) @ (b * b_dequant_scale) + bias)       with operands in float32, and in `cpu.mm`
    a [M, K], b [K, N] -> [M, N] in out_dtype

Every float8 value is a bfloat16 value, and the product of two bfloat16 numbers is exact in float32. So the operands are
widened exactly and multiplied on the machine's bfloat16 units, with sums in float32. CPUs with bfloat16 dot products in
AVX-512 and without AMX use `cpu.mm` instead; this file serves all other devices.

A compiler sees one operation, like the hardware's float8 matmul. It then saves the float8 operand for backward. If it
saw the widening, it would save the widened operand, which is twice the size.

Block scales, and the row scales of a weight whose rows are contracted, differ between the terms of a sum. They are
multiplied into the widened operand. If they are powers of two, this is exact in bfloat16. Otherwise the operand is
float32, with one rounding per element, and so is the matmul.

[Note: panels] Native float8 matmuls widen nothing, so the widened operands are extra memory. On a CPU, therefore, only
the smaller operand is widened at once. The larger operand is widened in panels of about a thousand rows (or columns of
b), and each panel is multiplied into its part of the result. No sum is split, so results equal one matmul's. If sums
are float32, only the sums of one panel are alive at a time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quaver.kernels import cpu
from quaver.kernels.operands import Operand, require
from quaver.kernels.operation import register_operation
from quaver.kernels.widen import widen
from quaver.recipes import e2m1
from quaver.recipes.formats import E2M1
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import multiply_scale_
from quaver.runtime.devices import get_compute_capability, is_cpu, is_cuda, is_cuda_device
from quaver.torch_private.hardware import has_avx512_bfloat16, onednn_has_bfloat16

MIN_BFLOAT16_MM_ELEMENTS = 8192
"""A CPU's bfloat16 units beat float32 if the largest matrix has this many elements: they take microseconds to start."""

MIN_PANEL_MM_ELEMENTS = 4096
"""Elements of the largest matrix below which the calls of a matmul on a CPU take longer than its arithmetic."""

MAX_PANEL_LENGTH = 1024
"""The most rows or columns of a panel on a CPU, unless it then has fewer than `MIN_PANEL_ELEMENTS`."""

MIN_PANEL_ELEMENTS = 1 << 19
"""The elements of a panel below which starting its matmul costs more time than the memory is worth."""


def has_bfloat16_units(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 numbers and accumulates in float32 in hardware."""
    if is_cuda_device(device):
        return torch.version.hip is not None or get_compute_capability(device.index) >= (8, 0)
    return device.type == "cpu" and _cpu_has_bfloat16_units()


@functools.cache
def _cpu_has_bfloat16_units() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        # Do not ask oneDNN: it accepts AVX-512 without bfloat16, where its matmul takes three times as long as float32.
        return has_avx512_bfloat16()
    return onednn_has_bfloat16()


class ExactMatmul(NamedTuple):
    """The arguments of `exact_float8_mm` after `a`, as in `linear.gemm.float8_mm`."""

    b: Tensor
    a_dequant_scale: Tensor
    b_dequant_scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype
    scales_are_powers_of_2: bool
    a_layout: Sequence[int]
    b_layout: Sequence[int]
    a_outer_scale: Tensor | None = None
    b_outer_scale: Tensor | None = None


def _exact_float8_mm(a: Tensor, matmul: ExactMatmul) -> Tensor:
    """Compute the equation at the top of the file on plain tensors."""
    a_operand = Operand(a, matmul.a_dequant_scale, ScaleLayout(*matmul.a_layout), None, matmul.a_outer_scale)
    b_operand = Operand(matmul.b, matmul.b_dequant_scale, ScaleLayout(*matmul.b_layout), None, matmul.b_outer_scale)
    a_operand, b_operand = unpack_codes(a_operand), unpack_codes(b_operand)
    out = a.new_empty(a_operand.data.shape[0], b_operand.data.shape[1], dtype=matmul.out_dtype)
    return _multiply_wide(a_operand, b_operand, matmul.bias, matmul.scales_are_powers_of_2, out)


def exact_float8_mm_out(out: Tensor, a: Operand, b: Operand, *, scales_are_powers_of_2: bool) -> None:
    """Write `exact_float8_mm` to contiguous rows [M, N]. For plain tensors inside another operation only."""
    scales = require(a.dequant_scale, "the dequant_scale"), require(b.dequant_scale, "the dequant_scale")
    matmul = ExactMatmul(b.data, *scales, None, out.dtype, scales_are_powers_of_2, a.layout, b.layout)
    result = _mm_cpu(a.data, matmul) if is_cpu(a.data) else None
    if result is None:
        _multiply_wide(a, b, None, scales_are_powers_of_2, out)
    else:
        out.copy_(result)


def _multiply_wide(
    a_operand: Operand, b_operand: Operand, bias: Tensor | None, scales_are_powers_of_2: bool, out: Tensor
) -> Tensor:
    """Multiply two operands, write the product to `out`, and return it."""
    a, b, layouts = a_operand.data, b_operand.data, (a_operand.layout, b_operand.layout)
    varies_along_k = a_operand.varies_along(1), b_operand.varies_along(0)
    if is_cpu(a) and _count_elements_of_largest(a, b) < MIN_PANEL_MM_ELEMENTS:
        folded = [
            must_fold or (scales_are_powers_of_2 and not layout.is_tensorwise)
            for must_fold, layout in zip(varies_along_k, layouts, strict=True)
        ]
        return _small_mm((a_operand, b_operand), folded, bias, out)
    # The bfloat16 matmul applies one scale to the whole result; powers of two are exact in its operands.
    tensorwise = layouts[0].is_tensorwise and layouts[1].is_tensorwise
    is_exact_in_bfloat16 = tensorwise or scales_are_powers_of_2
    if is_exact_in_bfloat16 and _prefers_bfloat16(a, b, out.dtype):
        wide_dtype, mm = torch.bfloat16, _bfloat16_mm
    else:
        wide_dtype, mm = torch.float32, _float32_mm
    dim = 0 if a.numel() >= b.numel() else 1  # the dim of the larger operand and of the result that panels divide
    larger, smaller = (b_operand, a_operand) if dim else (a_operand, b_operand)
    widened = _widen_operand(smaller, wide_dtype, scales_are_powers_of_2, varies_along_k[1 - dim])
    block = 1 if larger.layout[dim] == ALL else larger.layout[dim]
    for start, length in split_panels(larger.data, dim, block):
        panel = _widen_operand(
            larger.narrow(dim, start, length), wide_dtype, scales_are_powers_of_2, varies_along_k[dim]
        )
        panel_bias = bias.narrow(0, start, length) if dim and bias is not None else bias
        operands = (widened, panel) if dim else (panel, widened)
        mm(*operands, panel_bias, out.narrow(dim, start, length))
        del panel, operands  # free the panel before the next one is widened
    return out


def _count_elements_of_largest(a: Tensor, b: Tensor) -> int:
    """Count the elements of the largest matrix: an expert's grad_weight is large even if the expert has few rows."""
    return max(a.numel(), b.numel(), a.shape[0] * b.shape[1])


def _prefers_bfloat16(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Return whether bfloat16 operands give a result in `out_dtype`, and do so faster than float32 operands."""
    if not has_bfloat16_units(a.device):
        return False
    return is_cuda(a) or (out_dtype is torch.bfloat16 and _count_elements_of_largest(a, b) >= MIN_BFLOAT16_MM_ELEMENTS)


def unpack_codes(operand: Operand) -> Operand:
    """Convert an operand of 4-bit codes to e4m3, which is exact; other operands are returned unchanged."""
    codes, dequant_scale, layout, _, outer_scale = operand
    if not layout.is_packed:
        return operand
    codes = e2m1.unpack(codes.t()).t() if layout.rows_of_byte > 1 else e2m1.unpack(codes)
    scale = require(dequant_scale, "the dequant_scale").float()
    return Operand(codes, scale, ScaleLayout(layout.rows, layout.columns), None, outer_scale)


class _WideOperand(NamedTuple):
    """An operand in bfloat16 or float32, and the scale to apply to the result."""

    data: Tensor
    result_scale: Tensor | None


def _widen_operand(
    operand: Operand, dtype: torch.dtype, scales_are_powers_of_2: bool, varies_along_k: bool
) -> _WideOperand:
    """Widen the codes, and fold in scales that vary along the contracted dim, or whose products are exact."""
    codes, dequant_scale, layout, _, outer_scale = operand
    if varies_along_k or (scales_are_powers_of_2 and not layout.is_tensorwise):
        return _WideOperand(widen(codes, dtype, dequant_scale, layout), outer_scale)
    return _WideOperand(widen(codes, dtype), dequant_scale)


def split_panels(codes: Tensor, dim: int, multiple: int = 1) -> list[tuple[int, int]]:
    """List start and length of the panels ([Note: panels]), nearly equal; starts are multiples of `multiple`."""
    length = codes.shape[dim]
    longest = max(MAX_PANEL_LENGTH, MIN_PANEL_ELEMENTS * length // max(codes.numel(), 1))
    if length <= longest or not is_cpu(codes):
        return [(0, length)]
    count = -(-length // longest)
    ends = [*(length * i // count // multiple * multiple for i in range(count)), length]
    return [(start, stop - start) for start, stop in zip(ends, ends[1:], strict=False)]


def _list_factors_of_sums(a_scale: Tensor | None, b_scale: Tensor | None) -> list[Tensor]:
    """Return the factors of the sums: the product of two tensorwise scales, else each scale.

    A sum times one tensorwise scale may overflow although the result is finite, for example with an amax of 1e36.
    """
    if a_scale is not None and b_scale is not None and a_scale.dim() == b_scale.dim() == 0:
        return [a_scale * b_scale]
    return [scale for scale in (a_scale, b_scale) if scale is not None]


# The matmuls below write to `out`, because autocast would cast the operands of a plain torch.mm.
def _bfloat16_mm(a: _WideOperand, b: _WideOperand, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute RN(alpha * (a @ b)) + bias, with one rounding of the float32 sum; alpha: product of result_scales."""
    scales = [scale for scale in (a.result_scale, b.result_scale) if scale is not None]
    alpha = functools.reduce(torch.mul, scales) if scales else None
    if is_cpu(out):  # out is bfloat16 (`_prefers_bfloat16`), and oneDNN applies alpha to its float32 sums
        torch.addmm(out, a.data, b.data, beta=0, alpha=1 if alpha is None else alpha.item(), out=out)
    else:
        # A float32 output also prevents cuBLAS from adding partial sums in bfloat16.
        sums = torch.empty_like(out, dtype=torch.float32)
        torch.mm(a.data, b.data, out_dtype=torch.float32, out=sums)
        out.copy_(sums if alpha is None else sums.mul_(alpha))
    return out if bias is None else out.add_(bias)


def _float32_mm(a: _WideOperand, b: _WideOperand, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute out = RN(scales * (a @ b) + bias), in float32 up to the last rounding."""
    sums = out if out.dtype is torch.float32 and out.is_contiguous() else torch.empty_like(out, dtype=torch.float32)
    torch.mm(a.data, b.data, out=sums)
    for scale in _list_factors_of_sums(a.result_scale, b.result_scale):
        sums.mul_(scale)
    if bias is not None:
        sums.add_(bias)
    return out if sums is out else out.copy_(sums)


def _small_mm(operands: tuple[Operand, Operand], folded: list[bool], bias: Tensor | None, out: Tensor) -> Tensor:
    """Widen and multiply two small operands in the fewest calls. `folded`: for each, whether to fold in its scales."""
    a, b = (
        _WideOperand(
            multiply_scale_(operand.data.float(), require(operand.dequant_scale, "the dequant_scale"), operand.layout),
            operand.outer_scale,
        )
        if fold
        else _WideOperand(operand.data.float(), operand.dequant_scale)
        for operand, fold in zip(operands, folded, strict=True)
    )
    return _float32_mm(a, b, bias, out)


def _mm_cpu(a: Tensor, matmul: ExactMatmul) -> Tensor | None:
    b, a_layout, b_layout = matmul.b, ScaleLayout(*matmul.a_layout), ScaleLayout(*matmul.b_layout)
    if E2M1.dtype in (a.dtype, b.dtype) or a_layout.varies_along(1, a.shape) or b_layout.varies_along(0, b.shape):
        return None
    return cpu.mm(a, b, matmul.a_dequant_scale, matmul.b_dequant_scale, matmul.bias, matmul.out_dtype)


def _mm_fake(a: Tensor, matmul: ExactMatmul) -> Tensor:
    a_layout, b_layout = ScaleLayout(*matmul.a_layout), ScaleLayout(*matmul.b_layout)
    rows, columns = a_layout.get_matrix_size(a)[0], b_layout.get_matrix_size(matmul.b)[1]
    return a.new_empty(rows, columns, dtype=matmul.out_dtype)


exact_float8_mm = register_operation(
    _exact_float8_mm, arguments=ExactMatmul, results=1, cpu=_mm_cpu, fake=_mm_fake, in_graphs=True
)


@register_flop_formula(torch.ops.quaver.exact_float8_mm)
def count_flops(a_shape: torch.Size, b_shape: torch.Size, *_: object, **__: object) -> int:
    """Count FLOPs as torch's aten._scaled_mm, for FlopCounterMode and the compiler's activation memory budget."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]
