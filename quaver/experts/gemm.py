"""Grouped matmuls: one for each group of rows (groups.py), in one operation.

    form           a                     b                     result            of group g
    OUTPUT         tokens [T, K]         weights [E * N, K]    [T, N]            a_g [t, K] @ b_g.t() [K, N]
    GRAD_INPUT     tokens [T, N]         weights [E * N, K]    [T, K]            a_g [t, N] @ b_g [N, K]
    GRAD_WEIGHT    tokens [T, N]         tokens [T, K]         [E, N, K]         a_g.t() [N, t] @ b_g [t, K]

Rows of the result that belong to no group are 0. With `transposed`, weights are stored [E, K, N], and so is the result
of GRAD_WEIGHT.

    device and operands                                                    runs as
    CPU                                                                    one `gemm.mm` a group: an expert is a linear
    GPU: e4m3, tensorwise or row-wise, and float8 units                    torch's scaled grouped matmul
    GPU: high precision, or scales that are powers of two; bfloat16        torch's grouped matmul, of widened operands
    GPU: others                                                            one `gemm.mm` a group

The second and the third wait for nothing on sm_90 and sm_100. On other GPUs torch's grouped matmul reads the ends on
the host, as the last does; both are said once. Widened operands are exact in bfloat16 (kernels/exact_mm.py), so the
second and the third differ in the order of sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quaver.experts import gpu_gemm
from quaver.experts.groups import Form, bounds_of, of_group, scales_of_rows
from quaver.kernels.exact_mm import exact_float8_mm_out
from quaver.kernels.operands import Operand
from quaver.kernels.operation import operation
from quaver.linear.gemm import (
    GemmBackend,
    ScaleKind,
    backend_for,
    casts_of_matmuls,
    failure_of_hardware,
    kind_of_casts,
    mm,
    says_whether_native,
)
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E4M3
from quaver.recipes.linear_casts import MatmulOptions
from quaver.recipes.scale_layout import ROWWISE, ScaleLayout
from quaver.recipes.scaling import dequantize
from quaver.runtime.devices import compute_capability, is_cpu
from quaver.runtime.phases import phase
from quaver.runtime.slow_paths import say_once
from quaver.torch_private.tracing import assume_constant_result


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor | None,
    b_dequant_scale: Tensor | None,
    ends: Tensor,
    form: str,
    transposed: bool,
    a_layout: Sequence[int],
    b_layout: Sequence[int],
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    scales_are_powers_of_2: bool,
    emulate: bool,
    pad: bool,
) -> Tensor:
    """The grouped matmul of a form; see the top of the file."""
    of_form = Form(form)
    a_operand = Operand(a, a_dequant_scale, ScaleLayout(*a_layout))
    b_operand = Operand(b, b_dequant_scale, ScaleLayout(*b_layout))
    options = MatmulOptions(use_fast_accum, scales_are_powers_of_2, emulate, pad)
    if not is_cpu(a):
        made = None
        if a_dequant_scale is not None and _has_native(a.device, emulate):
            made = gpu_gemm.scaled(a_operand, b_operand, ends, of_form, transposed, use_fast_accum)
        if made is None and out_dtype is torch.bfloat16 and (a_dequant_scale is None or scales_are_powers_of_2):
            made = gpu_gemm.widened(a_operand, b_operand, ends, of_form, transposed)
            if compute_capability(a.device.index)[0] not in gpu_gemm.GROUPED_ON:
                say_once(
                    f"torch's grouped matmul on {a.device}",
                    f"torch multiplies experts on {a.device} one by one, and waits for the sizes of their groups: its "
                    "grouped matmul has kernels for sm_90 and sm_100 alone",
                )
        if made is not None:
            return made.to(out_dtype)
        say_once(
            f"grouped matmuls on {a.device}",
            f"{a.device} multiplies these experts one by one, and waits for the sizes of their groups: its grouped "
            "matmul takes bfloat16, and float8 in e4m3 with scales of rows or tensors",
        )
    return _one_by_one(a_operand, b_operand, ends, of_form, transposed, options, out_dtype)


def grouped_backend_of_casts(
    left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool
) -> GemmBackend:
    """The backend on `device` of a grouped matmul whose operands are cast so."""
    fits = fits_grouped_matmul(left, right) and _has_native(device, emulate)
    return GemmBackend.NATIVE if fits else GemmBackend.EXACT


def fits_grouped_matmul(left: CastConfig, right: CastConfig) -> bool:
    """Whether torch's grouped matmul in float8 takes operands that are cast so, on the GPUs that have it."""
    fits = kind_of_casts(left, right) in (ScaleKind.TENSORWISE, ScaleKind.ROWWISE)
    return fits and left.target_dtype is right.target_dtype is E4M3.dtype


def grouped_backends_of(config: Float8LinearConfig, device: torch.device) -> str:
    """As `gemm.backends_of`, of the grouped matmuls of an expert."""
    pairs = casts_of_matmuls(config)
    found = {grouped_backend_of_casts(*pair, device, emulate=config.emulate) for pair in pairs}
    return " and ".join(backend.value for backend in GemmBackend if backend in found) or "high precision"


def _has_native(device: torch.device, emulate: bool) -> bool:
    return backend_for(device, ScaleKind.GROUPS, emulate=emulate, works=_native_works) is GemmBackend.NATIVE


@assume_constant_result
def _native_works(device_index: int, kind: ScaleKind) -> bool:
    return says_whether_native(device_index, kind, probe_native_grouped_mm)


def _one_by_one(
    a: Operand,
    b: Operand,
    ends: Tensor,
    form: Form,
    transposed: bool,
    options: MatmulOptions,
    out_dtype: torch.dtype,
) -> Tensor:
    groups = ends.shape[0]
    bounds = bounds_of(ends, groups, a.data.shape[0])
    b_bounds = bounds if form is Form.GRAD_WEIGHT else bounds_of(None, groups, b.data.shape[0])
    out = a.data.new_empty(_shape(a.data, b.data, groups, form, transposed), dtype=out_dtype)
    for group, (start, stop) in enumerate(bounds):
        left, right = (of_group(each, group, *rows) for each, rows in ((a, (start, stop)), (b, b_bounds[group])))
        if form is not Form.GRAD_WEIGHT:
            _multiply(left, right.t() if (form is Form.OUTPUT) is not transposed else right, options, out[start:stop])
        elif transposed:
            out[group] = mm(left.t(), right, options, out_dtype).t()
        else:
            _multiply(left.t(), right, options, out[group])
    if form is not Form.GRAD_WEIGHT:
        out[bounds[-1][1] :] = 0
    return out


def _multiply(a: Operand, b: Operand, options: MatmulOptions, out: Tensor) -> None:
    """`gemm.mm` into rows of the result."""
    is_float8 = a.dequant_scale is not None and b.dequant_scale is not None
    if is_float8 and is_cpu(out) and a.data.numel() and b.data.numel() and not options.pad:
        exact_float8_mm_out(out, a, b, options.scales_are_powers_of_2)
    else:
        out.copy_(mm(a, b, options, out.dtype))


def _shape(a: Tensor, b: Tensor, groups: int, form: Form, transposed: bool) -> tuple[int, ...]:
    if form is Form.GRAD_WEIGHT:
        sizes = (b.shape[1], a.shape[1]) if transposed else (a.shape[1], b.shape[1])
        return groups, *sizes
    by_rows = (form is Form.OUTPUT) is not transposed
    return a.shape[0], b.shape[0] // groups if by_rows else b.shape[1]


def _fake_grouped_mm(
    a: Tensor, b: Tensor, _a_scale: object, _b_scale: object, ends: Tensor, form: str, transposed: bool, *rest: Any
) -> Tensor:
    _, _, out_dtype, *_ = rest
    return a.new_empty(_shape(a, b, ends.shape[0], Form(form), transposed), dtype=out_dtype)


_operation = operation(_grouped_mm, results=1, fake=_fake_grouped_mm, in_graphs=True)


@phase("quaver::gemm")
def grouped_mm(
    a: Operand,
    b: Operand,
    ends: Tensor,
    form: Form,
    options: MatmulOptions,
    out_dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    """The grouped matmul of a form; see the top of the file. As `gemm.mm`, in high precision if `a` has no scale."""
    if a.dequant_scale is None:
        a, b = (Operand(_in_high_precision(each, ends, form, out_dtype)) for each in (a, b))
    scales, layouts = (a.dequant_scale, b.dequant_scale), (a.layout, b.layout)
    out: Tensor = _operation(a.data, b.data, *scales, ends, form.value, transposed, *layouts, out_dtype, *options)
    return out


def _in_high_precision(operand: Operand, ends: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """`linear.gemm.in_high_precision`, of tokens or, unless for GRAD_WEIGHT, of weights."""
    if operand.dequant_scale is None:
        return operand.data.to(dtype)
    scale, layout = scales_of_rows(operand, ends if form is Form.GRAD_WEIGHT else None, ends.shape[0])
    return dequantize(operand.data, scale, dtype, layout)


@register_flop_formula(torch.ops.quaver.grouped_mm)
def _flops(
    a_shape: torch.Size,
    b_shape: torch.Size,
    a_scale_shape: torch.Size | None,
    b_scale_shape: torch.Size | None,
    ends_shape: torch.Size,
    form: str,
    *_: object,
    out_shape: torch.Size,
    **__: object,
) -> int:
    """As torch counts a grouped matmul: every row of a belongs to a group."""
    return 2 * a_shape[0] * a_shape[1] * (b_shape[1] if form == Form.GRAD_WEIGHT.value else out_shape[1])


def probe_native_grouped_mm(device: torch.device, kind: ScaleKind) -> str | None:
    """`gemm.probe_native_mm` of torch's scaled grouped matmul: three groups, one empty."""
    numbers = torch.arange(48 * 32, device="cpu").view(48, 32)
    a, b = ((numbers % modulus - modulus // 2).float().to(E4M3.dtype) for modulus in (13, 7))
    a_scale, b_scale = ((numbers[:, :1] % modulus + 1).float() for modulus in (5, 3))
    ends = torch.tensor([20, 20, 48], dtype=torch.int32, device="cpu")
    left, right = Operand(a, a_scale, ROWWISE), Operand(b, b_scale, ROWWISE)
    expected = _one_by_one(left, right, ends, Form.OUTPUT, False, MatmulOptions(), torch.float32)
    try:
        out = gpu_gemm.scaled(left.to(device), right.to(device), ends.to(device), Form.OUTPUT, False, False)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return failure_of_hardware(error)
    wrong = out is None or bool((out.float().cpu() - expected).abs().max() > expected.abs().max() * 2**-7)
    return "a grouped matmul gave a wrong result" if wrong else None
