"""Multiplies float8 matrices, and lays out their codes as the device multiplies them.

    float8_mm(a, b, a_dequant_scale, b_dequant_scale) = (a * a_dequant_scale) @ (b * b_dequant_scale)
    a [M, K] and b [K, N], each with a scale of any granularity; result [M, N]

backends.py chooses the backend: the hardware's (kernels/native_mm.py), or exact (kernels/exact_mm.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.cast import to_column_major_after, to_row_major
from quaver.kernels.cpu import check_memory
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.kernels.native_mm import ScaleKind, find_scale_kind, native_mm, pad_operands
from quaver.kernels.operands import Operand
from quaver.kernels.widen import widen
from quaver.linear.backends import GemmBackend, choose_backend
from quaver.recipes.formats import E5M2, FLOAT8_FORMATS, HP_DTYPES
from quaver.recipes.linear_casts import MatmulOptions
from quaver.recipes.scale_layout import ScaleLayout, infer_layout
from quaver.recipes.scaling import dequantize
from quaver.runtime.compile_hints import is_compiling
from quaver.runtime.devices import is_cpu
from quaver.runtime.phases import phase


def float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    scales_are_powers_of_2: bool = False,
    emulate: bool = False,
    pad: bool = False,
    a_layout: ScaleLayout | None = None,
    b_layout: ScaleLayout | None = None,
) -> Tensor:
    """Multiply two scaled float8 matrices.

    Args:
        a: float8 [M, K], any strides.
        b: float8 [K, N], any strides.
        a_dequant_scale: float32, the scales of a, for instance (), [M, 1] or one per block.
        b_dequant_scale: float32, the scales of b, for instance (), [1, N] or one per block.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] in a high-precision dtype, added before the last rounding if the backend supports it.
        use_fast_accum, scales_are_powers_of_2, emulate, pad: see `MatmulOptions` in recipes/linear_casts.py.
        a_layout, b_layout: which elements share a scale; None to infer it from the shape of the scale (`infer_layout`).
    Returns:
        [M, N] in out_dtype.
    Raises:
        ValueError: shapes, dtypes or shapes of scales do not fit.
    """
    _check_codes(a, b)
    if out_dtype not in HP_DTYPES:
        raise ValueError(f"expected an out_dtype of {', '.join(map(str, HP_DTYPES))}, got {out_dtype}")
    if bias is not None and bias.dtype not in HP_DTYPES:
        raise ValueError(f"expected a bias of {', '.join(map(str, HP_DTYPES))}, got {bias.dtype}")
    if bias is not None and bias.shape != (b.shape[1],):
        raise ValueError(f"expected a bias of [{b.shape[1]}], got {list(bias.shape)}")
    a_operand = _check_operand("a", a, a_dequant_scale, a_layout)
    b_operand = _check_operand("b", b, b_dequant_scale, b_layout)
    check_memory(a, b, a_dequant_scale, b_dequant_scale, bias)
    options = MatmulOptions(use_fast_accum, scales_are_powers_of_2, emulate, pad)
    return multiply_operands(a_operand, b_operand, options, out_dtype, bias)


@phase("quaver::gemm")
def multiply_operands(
    a: Operand, b: Operand, options: MatmulOptions, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Multiply checked operands: a [M, K] @ b [K, N] + bias [N] -> [M, N] in out_dtype.

    If `a` has no scale, the matmul runs in high precision, and codes of `b` are dequantized.
    """
    if a.dequant_scale is None:
        b_hp = dequantize_operand(b, out_dtype, options.scales_are_powers_of_2)
        return torch.mm(a.data, b_hp) if bias is None else torch.addmm(bias.to(out_dtype), a.data, b_hp)
    if a.data.numel() == 0 or b.data.numel() == 0:
        zeros = torch.zeros((a.size[0], b.size[1]), dtype=out_dtype, device=a.data.device)
        return zeros if bias is None else zeros + bias.to(out_dtype)
    if not is_cpu(a.data) and _choose_backend_for(a, b, options) is GemmBackend.NATIVE:
        return native_mm(a, b, bias, out_dtype, options.use_fast_accum)
    columns = b.size[1]
    if options.pad:
        a, b = pad_operands(a, b)
        bias = bias if bias is None else F.pad(bias, (0, b.size[1] - columns))
    layouts, outer_scales = ([*a.layout], [*b.layout]), (a.outer_scale, b.outer_scale)
    scales = a.dequant_scale, b.dequant_scale
    power_of_2 = options.scales_are_powers_of_2
    out: Tensor = exact_float8_mm(a.data, b.data, *scales, bias, out_dtype, power_of_2, *layouts, *outer_scales)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()  # autograd.Functions return no views


def dequantize_operand(operand: Operand, dtype: torch.dtype, scales_are_powers_of_2: bool) -> Tensor:
    """Return the values of an operand, which may be in high precision already, in `dtype`."""
    data, scale, layout, _, outer_scale = operand
    if scale is None:
        return data if data.dtype is dtype else data.to(dtype)
    if is_compiling() or outer_scale is not None:
        return dequantize(data, scale, dtype, layout, outer_scale)
    is_exact = dtype is torch.bfloat16 and scales_are_powers_of_2
    return widen(data, dtype if is_exact else torch.float32, scale, layout).to(dtype)


def _check_codes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in FLOAT8_FORMATS or b.dtype not in FLOAT8_FORMATS:
        raise ValueError(f"expected two float8 matrices, got {a.dtype} and {b.dtype}")
    if a.dtype is E5M2.dtype and b.dtype is E5M2.dtype:
        raise ValueError("expected an operand in e4m3, got two in e5m2, which no hardware multiplies")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")


def _check_operand(name: str, codes: Tensor, dequant_scale: Tensor, layout: ScaleLayout | None) -> Operand:
    try:
        if dequant_scale.dtype is not torch.float32:
            raise ValueError(f"expected float32, got {dequant_scale.dtype}")
        layout = layout or infer_layout(dequant_scale, codes.shape)
        shape = layout.get_scale_shape(codes.shape[0], codes.shape[1])
        if dequant_scale.shape != shape:
            raise ValueError(f"expected a {layout} scale of shape {list(shape)}, got {list(dequant_scale.shape)}")
    except ValueError as error:
        raise ValueError(f"{name}_dequant_scale: {error}") from None
    return Operand(codes, dequant_scale, layout)


def _choose_backend_for(a: Operand, b: Operand, options: MatmulOptions) -> GemmBackend:
    kind = find_scale_kind(a, b)
    if kind is ScaleKind.BLOCKS_OF_32 and not options.scales_are_powers_of_2:
        kind = None  # the hardware's scales have no mantissa
    return choose_backend(a.data.device, kind, emulate=options.emulate)


def needs_contracted_dim_contiguous(device: torch.device, *, emulate: bool = False) -> bool:
    """Return whether `device` multiplies natively: the hardware reads contiguous dot products of both operands."""
    return choose_backend(device, ScaleKind.TENSORWISE, emulate=emulate) is GemmBackend.NATIVE


def lay_out_rows(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Return row codes in the layout that the device multiplies: the native backend needs contiguous rows."""
    if is_cpu(codes) or not needs_contracted_dim_contiguous(codes.device, emulate=emulate):
        return codes
    return to_row_major(codes)


def lay_out_columns(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Return column codes in the layout that the device multiplies: the native backend needs contiguous columns."""
    if is_cpu(codes) or not needs_contracted_dim_contiguous(codes.device, emulate=emulate):
        return codes
    return to_row_major(codes.t()).t()


def lay_out_saved_columns(codes: Tensor, gradient: Tensor, *, emulate: bool = False) -> Tensor:
    """Run `lay_out_columns` on the saved codes [N, K] of a weight in compiled code, after `gradient`.

    The codes were quantized before the graph, so no cast can be fused with the copy. Without the order Inductor would
    copy in the forward and save the copy. Eager code copies when it multiplies.
    """
    if not torch.compiler.is_compiling() or is_cpu(codes) or codes.t().is_contiguous():
        return codes
    if not needs_contracted_dim_contiguous(codes.device, emulate=emulate):
        return codes
    return to_column_major_after(codes, gradient)
