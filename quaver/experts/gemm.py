"""Grouped matmuls: one operation with a matmul for each group of rows (groups.py).

    matmul         a                     b                     result            of group g
    OUTPUT         tokens [T, K]         weights [E * N, K]    [T, N]            a_g [t, K] @ b_g.t() [K, N]
    GRAD_INPUT     tokens [T, N]         weights [E * N, K]    [T, K]            a_g [t, N] @ b_g [N, K]
    GRAD_WEIGHT    tokens [T, N]         tokens [T, K]         [E, N, K]         a_g.t() [N, t] @ b_g [t, K]

Rows of the result outside every group are 0. With `transposed`, weights and the result of GRAD_WEIGHT are stored
[E, K, N]. The device and the operands decide how it runs:

    device and operands                                                    runs as
    CPU                                                                    a matmul per group, as for linears
    GPU: e4m3, tensorwise or rowwise, and float8 units                     torch's scaled grouped matmul
    GPU: high precision, or scales that are powers of two; bfloat16        torch's grouped matmul, of widened operands
    GPU: others                                                            a matmul per group

torch's grouped matmuls do not synchronize on sm_90 and sm_100. On other GPUs they read the ends on the host, as the
last row of this table does. A slow-path report says so once. Widened operands are exact in bfloat16
(kernels/exact_mm.py), so the second and the third row differ only in the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quaver.experts import gpu_gemm
from quaver.experts.groups import ExpertMatmul, expand_row_scales, find_group_bounds, select_group
from quaver.kernels.exact_mm import exact_float8_mm_out
from quaver.kernels.native_mm import ScaleKind
from quaver.kernels.operands import Operand
from quaver.kernels.operation import register_operation
from quaver.linear.backends import (
    GemmBackend,
    choose_backend,
    describe_backends,
    describe_hardware_failure,
    is_expected_product,
    predict_scale_kind,
    run_trial,
)
from quaver.linear.gemm import multiply_operands
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E4M3
from quaver.recipes.linear_casts import MatmulOptions
from quaver.recipes.scale_layout import ROWWISE, ScaleLayout
from quaver.recipes.scaling import dequantize
from quaver.runtime.devices import get_compute_capability, is_cpu
from quaver.runtime.phases import phase
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.tracing import assume_constant_result


class GroupedMatmul(NamedTuple):
    """The arguments of the operation `grouped_mm` after `a`; see the top of the file. The last four are its options."""

    b: Tensor
    a_dequant_scale: Tensor | None
    b_dequant_scale: Tensor | None
    ends: Tensor
    matmul: str
    """A value of `ExpertMatmul`."""
    transposed: bool
    a_layout: Sequence[int]
    b_layout: Sequence[int]
    out_dtype: torch.dtype
    use_fast_accum: bool
    scales_are_powers_of_2: bool
    emulate: bool
    pad: bool


def _grouped_mm(a: Tensor, grouped: GroupedMatmul) -> Tensor:
    """Multiply each group by the first way of the table at the top that supports the device and the operands."""
    if a.is_meta:
        return _grouped_mm_fake(a, grouped)
    a_operand = Operand(a, grouped.a_dequant_scale, ScaleLayout(*grouped.a_layout))
    b_operand = Operand(grouped.b, grouped.b_dequant_scale, ScaleLayout(*grouped.b_layout))
    options = MatmulOptions(grouped.use_fast_accum, grouped.scales_are_powers_of_2, grouped.emulate, grouped.pad)
    arguments = a_operand, b_operand, grouped.ends, ExpertMatmul(grouped.matmul), grouped.transposed
    if not is_cpu(a):
        out, is_hp, out_dtype = None, grouped.a_dequant_scale is None, grouped.out_dtype
        if not is_hp and _has_native(a.device, emulate=grouped.emulate):
            out = gpu_gemm.multiply_scaled(*arguments, use_fast_accum=grouped.use_fast_accum)
        if out is None and out_dtype is torch.bfloat16 and (is_hp or grouped.scales_are_powers_of_2):
            out = gpu_gemm.multiply_widened(*arguments)
            if get_compute_capability(a.device.index)[0] not in gpu_gemm.GROUPED_MM_CAPABILITIES:
                report_slow_path(
                    f"torch's grouped matmul on {a.device}",
                    f"torch multiplies experts on {a.device} one by one, and waits for the sizes of their groups: its "
                    "grouped matmul has kernels for sm_90 and sm_100 only",
                )
        if out is not None:
            return out.to(out_dtype)
        report_slow_path(
            f"grouped matmuls on {a.device}",
            f"{a.device} multiplies these experts one by one, and waits for the sizes of their groups: its grouped "
            "matmul supports bfloat16, and e4m3 with rowwise or tensorwise scales",
        )
    return _multiply_groups(*arguments, options, grouped.out_dtype)


def predict_grouped_backend(left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool) -> GemmBackend:
    """Return the backend on `device` of a grouped matmul from its operands' casts."""
    fits = fits_grouped_matmul(left, right) and _has_native(device, emulate=emulate)
    return GemmBackend.NATIVE if fits else GemmBackend.EXACT


def fits_grouped_matmul(left: CastConfig, right: CastConfig) -> bool:
    """Return whether torch's float8 grouped matmul supports operands with these casts."""
    fits = predict_scale_kind(left, right) in (ScaleKind.TENSORWISE, ScaleKind.ROWWISE)
    return fits and left.target_dtype is right.target_dtype is E4M3.dtype


def describe_grouped_backends(
    config: Float8LinearConfig, device: torch.device, *, has_row_codes_only: bool = False
) -> str:
    """Return the backends of experts' grouped matmuls on `device`; see `backends.describe_backends`."""
    return describe_backends(config, device, predict_grouped_backend, has_row_codes_only=has_row_codes_only)


def _has_native(device: torch.device, *, emulate: bool) -> bool:
    return (
        choose_backend(device, ScaleKind.GROUPS, emulate=emulate, is_native=_run_grouped_trial_as_constant)
        is GemmBackend.NATIVE
    )


@assume_constant_result
def _run_grouped_trial_as_constant(device_index: int, kind: ScaleKind) -> bool:
    return run_trial(device_index, kind, try_native_grouped_mm)


def _multiply_groups(
    a: Operand,
    b: Operand,
    ends: Tensor,
    matmul: ExpertMatmul,
    transposed: bool,
    options: MatmulOptions,
    out_dtype: torch.dtype,
) -> Tensor:
    num_groups = ends.shape[0]
    bounds = find_group_bounds(ends, num_groups, a.data.shape[0])
    b_bounds = bounds if matmul is ExpertMatmul.GRAD_WEIGHT else find_group_bounds(None, num_groups, b.data.shape[0])
    out = a.data.new_empty(_get_result_shape(a.data, b.data, num_groups, matmul, transposed), dtype=out_dtype)
    for group, (start, stop) in enumerate(bounds):
        left, right = (select_group(side, group, *rows) for side, rows in ((a, (start, stop)), (b, b_bounds[group])))
        if matmul is not ExpertMatmul.GRAD_WEIGHT:
            right = right.t() if matmul.reads_rows(transposed) else right
            _multiply_one(left, right, options, out[start:stop])
        elif transposed:
            out[group] = multiply_operands(left.t(), right, options, out_dtype).t()
        else:
            _multiply_one(left.t(), right, options, out[group])
    if matmul is not ExpertMatmul.GRAD_WEIGHT:
        out[bounds[-1][1] :] = 0
    return out


def _multiply_one(a: Operand, b: Operand, options: MatmulOptions, out: Tensor) -> None:
    """Run `gemm.multiply_operands` and write into rows of the result."""
    is_float8 = a.dequant_scale is not None and b.dequant_scale is not None
    if is_float8 and is_cpu(out) and a.data.numel() and b.data.numel() and not options.pad:
        exact_float8_mm_out(out, a, b, scales_are_powers_of_2=options.scales_are_powers_of_2)
    else:
        out.copy_(multiply_operands(a, b, options, out.dtype))


def _get_result_shape(a: Tensor, b: Tensor, num_groups: int, matmul: ExpertMatmul, transposed: bool) -> tuple[int, ...]:
    if matmul is ExpertMatmul.GRAD_WEIGHT:
        sizes = (b.shape[1], a.shape[1]) if transposed else (a.shape[1], b.shape[1])
        return num_groups, *sizes
    return a.shape[0], b.shape[0] // num_groups if matmul.reads_rows(transposed) else b.shape[1]


def _grouped_mm_fake(a: Tensor, grouped: GroupedMatmul) -> Tensor:
    num_groups, matmul = grouped.ends.shape[0], ExpertMatmul(grouped.matmul)
    return a.new_empty(_get_result_shape(a, grouped.b, num_groups, matmul, grouped.transposed), dtype=grouped.out_dtype)


_operation = register_operation(_grouped_mm, arguments=GroupedMatmul, results=1, fake=_grouped_mm_fake, in_graphs=True)


@phase("quaver::gemm")
def grouped_mm(
    a: Operand,
    b: Operand,
    ends: Tensor,
    matmul: ExpertMatmul,
    options: MatmulOptions,
    out_dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    """Multiply each group of rows of `a` by its part of `b`; the top of the file has the shapes and devices.

    Args:
        a: tokens, or rows of grad_output: codes with scales of rows or groups. Without a scale both operands are
            dequantized to `out_dtype` and multiplied in high precision.
        b: weights, or the tokens of `ExpertMatmul.GRAD_WEIGHT`.
        ends: int32 [E], where the rows of each expert end; later rows of the result are 0.
        transposed: whether the weights, and the result of GRAD_WEIGHT, are stored [E, K, N].
    """
    if a.dequant_scale is None:
        a, b = (Operand(_dequantize(side, ends, matmul, out_dtype)) for side in (a, b))
    scales, layouts = (a.dequant_scale, b.dequant_scale), (a.layout, b.layout)
    return _operation(a.data, b.data, *scales, ends, matmul.value, transposed, *layouts, out_dtype, *options)


def _dequantize(operand: Operand, ends: Tensor, matmul: ExpertMatmul, dtype: torch.dtype) -> Tensor:
    """Return the values of tokens in GRAD_WEIGHT, else of weights, which may be in high precision already."""
    if operand.dequant_scale is None:
        return operand.data.to(dtype)
    scale, layout = expand_row_scales(operand, ends if matmul is ExpertMatmul.GRAD_WEIGHT else None, ends.shape[0])
    return dequantize(operand.data, scale, dtype, layout)


@register_flop_formula(torch.ops.quaver.grouped_mm)
def _count_flops(
    a_shape: torch.Size,
    b_shape: torch.Size,
    a_scale_shape: torch.Size | None,
    b_scale_shape: torch.Size | None,
    ends_shape: torch.Size,
    matmul: str,
    *_: object,
    out_shape: torch.Size,
    **__: object,
) -> int:
    """Count FLOPs as torch does for a grouped matmul: every row of a belongs to a group."""
    return 2 * a_shape[0] * a_shape[1] * (b_shape[1] if matmul == ExpertMatmul.GRAD_WEIGHT.value else out_shape[1])


def try_native_grouped_mm(device: torch.device, kind: ScaleKind) -> str | None:
    """Do as `backends.try_native_mm` for torch's scaled grouped matmul, with three groups, one of them empty."""
    numbers = torch.arange(48 * 32, device="cpu").view(48, 32)
    a, b = ((numbers % modulus - modulus // 2).float().to(E4M3.dtype) for modulus in (13, 7))
    a_scale, b_scale = ((numbers[:, :1] % modulus + 1).float() for modulus in (5, 3))
    ends = torch.tensor([20, 20, 48], dtype=torch.int32, device="cpu")
    left, right = Operand(a, a_scale, ROWWISE), Operand(b, b_scale, ROWWISE)
    matmul, options = ExpertMatmul.OUTPUT, MatmulOptions()
    expected = _multiply_groups(left, right, ends, matmul, transposed=False, options=options, out_dtype=torch.float32)
    try:
        on_device = left.to(device), right.to(device), ends.to(device)
        out = gpu_gemm.multiply_scaled(*on_device, matmul, transposed=False, use_fast_accum=False)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return describe_hardware_failure(error)
    return None if out is not None and is_expected_product(out, expected) else "a grouped matmul gave a wrong result"
