"""SwiGLU and RMSNorm, cast to float8 as they are computed: a float8 linear in front of which they stand reads no more.

    swiglu      RNh(RNh(silu(gate)) * up)                                RNh: to the dtype of gate and up
    rms_norm    RNp(RNh(hidden * inverse_rms * weight))                  RNh: to hidden's dtype, RNp: to hp_dtype
                inverse_rms = 1 / sqrt(mean(hidden^2) + eps)

Each comes with the three casts of layouts.py that read a matrix: one scale of the result's amax (`_layouts`), a kept
scale (`_with_kept_scale`), and a scale a row and a column (`_axes`). What is returned is what layouts.py returns for
the result; the result itself is neither written nor kept. A backward needs gate and up, or hidden and inverse_rms.

Bytes that a GPU moves for an element of bfloat16, rows / both layouts, where 2 of them write the result and 2 a read of
it in the unfused way:

                                swiglu      the same, unfused       rms_norm    the same, unfused
    cast_layouts                 9 / 10     11 / 12                  5 / 6       9 / 10
    cast_with_persistent_scale         5 / 6       9 / 10                  3 / 6       7 / 8
    cast_axes                    5 / 10      9 / 12                  3 / 6       7 / 10

(2 more for each read of a float32 hidden: three casts of rms_norm read it once for row codes, or twice.)

PyTorch's expression and the casts of layouts.py are the reference, and what runs for anything but plain tensors on an
NVIDIA GPU that rounds once, and for rows of RMSNorm that are wider than the chip holds (triton_rms_norm.py). The
kernels' codes are those of the reference but where exp or 1/sqrt differ in the last bits of a float32
(triton_produced.py). To a compiler, and to a dispatch mode, each function is one operation (producer_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.formats import HP_DTYPES, format_of
from quaver.kernels import producer_ops
from quaver.kernels.layout_ops import under_dispatch_mode
from quaver.kernels.layouts import AxisCast, AxisCasts, LayoutCast


def swiglu_cast_layouts(
    gate: Tensor, up: Tensor, float8_dtype: torch.dtype, *, rows: bool, columns: bool, power_of_2: bool = False
) -> LayoutCast:
    """`layouts.cast_layouts` of silu(gate) * up.

    Args:
        gate, up: [R, C], float32, bfloat16 or float16, both the same.
        float8_dtype: what to cast to.
        rows, columns: which codes are wanted.
        power_of_2: round the scale down to a power of two.
    Raises:
        ValueError: gate and up are no matrices, differ in shape or dtype, or are of another dtype; float8_dtype is
            none; or nothing is wanted.
    """
    _check_swiglu(gate, up)
    _check_wanted(float8_dtype, rows, columns)
    return _layout_cast(_run("swiglu_cast_layouts", gate, up, float8_dtype, rows, columns, power_of_2), rows, columns)


def swiglu_cast_with_persistent_scale(
    gate: Tensor,
    up: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
) -> tuple[LayoutCast, Tensor]:
    """`layouts.cast_with_persistent_scale` of silu(gate) * up, with a quant_scale () on gate's device; see
    `swiglu_cast_layouts`.

    Returns:
        The cast, with the quant_scale that was used; and float32 [2]: the product's amax, and how many elements
        saturated.
    """
    _check_swiglu(gate, up)
    _check_wanted(float8_dtype, rows, columns)
    *made, observed = _run(
        "swiglu_cast_with_persistent_scale", gate, up, quant_scale, float8_dtype, rows, columns, power_of_2
    )
    return _layout_cast(made, rows, columns), observed


def swiglu_cast_axes(
    gate: Tensor, up: Tensor, float8_dtype: torch.dtype, *, rows: bool, columns: bool, power_of_2: bool = False
) -> AxisCasts:
    """`layouts.cast_axes` of silu(gate) * up; see `swiglu_cast_layouts`."""
    _check_swiglu(gate, up)
    _check_wanted(float8_dtype, rows, columns)
    return _axis_casts(_run("swiglu_cast_axes", gate, up, float8_dtype, rows, columns, power_of_2), rows, columns)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of silu(gate) * up, in one pass, rounded as PyTorch rounds them (quaver/producers.py).

    Args:
        grad, gate, up: [R, C], float32, bfloat16 or float16, all the same.
    Returns:
        grad_gate and grad_up: [R, C], contiguous, of the same dtype.
    Raises:
        ValueError: these are no matrices, differ in shape or dtype, or are of another dtype.
    """
    _check_swiglu(gate, up)
    _check_alike("grad", grad, "gate", gate)
    return _run("swiglu_backward", grad, gate, up)


def rms_norm_cast_layouts(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
) -> tuple[LayoutCast, Tensor]:
    """`layouts.cast_layouts` of hidden over its root mean square along dim 1, times weight.

    Args:
        hidden: [R, D], float32, bfloat16 or float16.
        weight: [D], one of these; rounded to hidden's dtype.
        eps: added to the mean square.
        hp_dtype: one of these: what a linear would have been given.
        float8_dtype: what to cast to.
        rows, columns: which codes are wanted.
        power_of_2: round the scale down to a power of two.
    Returns:
        The cast; and inverse_rms: float32 [R].
    Raises:
        ValueError: hidden is no matrix, weight does not fit it, a dtype is another, or nothing is wanted.
    """
    _check_rms_norm(hidden, weight, hp_dtype)
    _check_wanted(float8_dtype, rows, columns)
    *made, inverse_rms = _run(
        "rms_norm_cast_layouts", hidden, weight, eps, hp_dtype, float8_dtype, rows, columns, power_of_2
    )
    return _layout_cast(made, rows, columns), inverse_rms


def rms_norm_cast_with_persistent_scale(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
) -> tuple[LayoutCast, Tensor, Tensor]:
    """`layouts.cast_with_persistent_scale` of the norm, with a quant_scale () on hidden's device; see
    `rms_norm_cast_layouts`.

    Returns:
        The cast, with the quant_scale that was used; float32 [2]: the norm's amax, and how many elements saturated; and
        inverse_rms: float32 [R].
    """
    _check_rms_norm(hidden, weight, hp_dtype)
    _check_wanted(float8_dtype, rows, columns)
    *made, observed, inverse_rms = _run(
        "rms_norm_cast_with_persistent_scale",
        hidden,
        weight,
        eps,
        hp_dtype,
        quant_scale,
        float8_dtype,
        rows,
        columns,
        power_of_2,
    )
    return _layout_cast(made, rows, columns), observed, inverse_rms


def rms_norm_cast_axes(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
) -> tuple[AxisCasts, Tensor]:
    """`layouts.cast_axes` of the norm, and inverse_rms: float32 [R]; see `rms_norm_cast_layouts`."""
    _check_rms_norm(hidden, weight, hp_dtype)
    _check_wanted(float8_dtype, rows, columns)
    *made, inverse_rms = _run(
        "rms_norm_cast_axes", hidden, weight, eps, hp_dtype, float8_dtype, rows, columns, power_of_2
    )
    return _axis_casts(made, rows, columns), inverse_rms


def rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the norm, in float32 until they are written (quaver/producers.py).

    Args:
        grad: [R, D], float32, bfloat16 or float16.
        hidden, weight: as `rms_norm_cast_layouts` was given them.
        inverse_rms: float32 [R], which it returned.
    Returns:
        grad_hidden: [R, D], contiguous, of hidden's dtype; and grad_weight: [D], of weight's dtype, added up in an
        order that depends on the shape alone.
    Raises:
        ValueError: hidden is no matrix, or another tensor does not fit it, or is of another dtype.
    """
    _check_rms_norm(hidden, weight, grad.dtype)
    if grad.shape != hidden.shape:
        raise ValueError(f"expected a grad of hidden's shape {list(hidden.shape)}, got {list(grad.shape)}")
    if inverse_rms.dtype is not torch.float32 or inverse_rms.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected an inverse_rms of torch.float32 and shape {list(hidden.shape[:1])}, as the forward returned it, "
            f"got {inverse_rms.dtype} of {list(inverse_rms.shape)}"
        )
    return _run("rms_norm_backward", grad, hidden, weight, inverse_rms)


def _run(name: str, *args: Any) -> Any:
    """The function of producer_ops.py; the operation where somebody looks on."""
    return getattr(torch.ops.quaver if under_dispatch_mode() else producer_ops, name)(*args)


def _check_matrix(name: str, hp: Tensor) -> None:
    if hp.dim() != 2 or hp.dtype not in HP_DTYPES:
        raise ValueError(
            f"expected {name} to be a matrix of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype} of {list(hp.shape)}"
        )


def _check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        raise ValueError(
            f"expected {name} to have the shape and dtype of {other_name}, {other.dtype} of {list(other.shape)}, "
            f"got {tensor.dtype} of {list(tensor.shape)}"
        )


def _check_swiglu(gate: Tensor, up: Tensor) -> None:
    _check_matrix("gate", gate)
    _check_alike("up", up, "gate", gate)


def _check_rms_norm(hidden: Tensor, weight: Tensor, hp_dtype: torch.dtype) -> None:
    _check_matrix("hidden", hidden)
    if weight.shape != hidden.shape[1:]:
        raise ValueError(
            f"expected a weight of shape {list(hidden.shape[1:])}, one a column of hidden, got {list(weight.shape)}"
        )
    for name, dtype in (("weight", weight.dtype), ("result", hp_dtype)):
        if dtype not in HP_DTYPES:
            raise ValueError(f"expected a {name} of {', '.join(map(str, HP_DTYPES))}, got {dtype}")


def _check_wanted(float8_dtype: torch.dtype, rows: bool, columns: bool) -> None:
    format_of(float8_dtype)
    if not (rows or columns):
        raise ValueError("expected row codes, column codes or both to be wanted, got neither")


def _layout_cast(made: Sequence[Any], rows: bool, columns: bool) -> LayoutCast:
    row_codes, column_codes, quant, dequant = made
    return LayoutCast(row_codes if rows else None, column_codes if columns else None, quant, dequant, None)


def _axis_casts(made: Sequence[Any], rows: bool, columns: bool) -> AxisCasts:
    return AxisCasts(AxisCast(*made[0:3]) if rows else None, AxisCast(*made[3:6]) if columns else None, None)
