"""The producers of fused_producers.py: where each runs, and as operations of a compiler.

Eager code calls the functions below. Compiled code calls the operations of the same names, which return tensors only:
what is not wanted is empty. Without Triton a producer is PyTorch's expression, and its result is cast by layout_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels import layout_ops
from quaver.kernels.layout_ops import dense, runs_on_triton

Made = tuple[Any, ...]
"""Tensors; None where one is not wanted."""


# ---- SwiGLU ------------------------------------------------------------------------------------------------------


def swiglu_cast_layouts(
    gate: Tensor, up: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool
) -> Made:
    """`fused_producers.swiglu_cast_layouts`: row codes, column codes, quant_scale, dequant_scale."""
    gate, up = map(dense, (gate, up))
    if runs_on_triton(float8_dtype, gate, up):
        from quaver.kernels import triton_swiglu

        return triton_swiglu.cast_layouts(gate, up, float8_dtype, rows, columns, power_of_2)
    return layout_ops.cast_layouts(F.silu(gate) * up, float8_dtype, rows, columns, power_of_2, False)[:4]


def swiglu_cast_with_persistent_scale(
    gate: Tensor,
    up: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """The same with an earlier scale: row codes, column codes, quant_scale, dequant_scale, float32 [2] observed."""
    gate, up = map(dense, (gate, up))
    if runs_on_triton(float8_dtype, gate, up):
        from quaver.kernels import triton_swiglu

        return triton_swiglu.cast_with_persistent_scale(gate, up, quant_scale, float8_dtype, rows, columns, power_of_2)
    product = F.silu(gate) * up
    made = layout_ops.cast_with_persistent_scale(product, quant_scale, float8_dtype, rows, columns, power_of_2, False)
    return *made[:4], made[5]


def swiglu_cast_axes(
    gate: Tensor, up: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool
) -> Made:
    """Along both axes: codes, quant_scale and dequant_scale of the rows, then of the columns."""
    gate, up = map(dense, (gate, up))
    if runs_on_triton(float8_dtype, gate, up):
        from quaver.kernels import triton_swiglu

        return triton_swiglu.cast_axes(gate, up, float8_dtype, rows, columns, power_of_2)
    return layout_ops.cast_axes(F.silu(gate) * up, float8_dtype, rows, columns, power_of_2, False)[:6]


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> Made:
    """The gradients of gate and of up."""
    grad, gate, up = map(dense, (grad, gate, up))
    if runs_on_triton(torch.float8_e4m3fn, grad, gate, up):
        from quaver.kernels import triton_producer_grads

        return triton_producer_grads.swiglu(grad, gate, up)
    return (torch.ops.aten.silu_backward(grad * up, gate).contiguous(), (F.silu(gate) * grad).contiguous())


# ---- RMSNorm -----------------------------------------------------------------------------------------------------


def rms_norm_cast_layouts(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale, and float32 [R], the inverse RMS of each row."""
    hidden, weight = map(dense, (hidden, weight))
    if _norm_runs_on_triton(hidden, weight, float8_dtype):
        from quaver.kernels import triton_rms_norm

        return triton_rms_norm.cast_layouts(hidden, weight, eps, hp_dtype, float8_dtype, rows, columns, power_of_2)
    normed, inverse_rms = _rms_norm(hidden, weight, eps, hp_dtype)
    made = layout_ops.cast_layouts(normed, float8_dtype, rows, columns, power_of_2, False)
    return *made[:4], inverse_rms


def rms_norm_cast_with_persistent_scale(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """The same with an earlier scale, and what it observed, float32 [2], before the inverse RMS."""
    hidden, weight = map(dense, (hidden, weight))
    if _norm_runs_on_triton(hidden, weight, float8_dtype):
        from quaver.kernels import triton_rms_norm

        return triton_rms_norm.cast_with_persistent_scale(
            hidden, weight, eps, hp_dtype, quant_scale, float8_dtype, rows, columns, power_of_2
        )
    normed, inverse_rms = _rms_norm(hidden, weight, eps, hp_dtype)
    made = layout_ops.cast_with_persistent_scale(normed, quant_scale, float8_dtype, rows, columns, power_of_2, False)
    return *made[:4], made[5], inverse_rms


def rms_norm_cast_axes(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    hp_dtype: torch.dtype,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
) -> Made:
    """Codes, quant_scale and dequant_scale of the rows, then of the columns, and the inverse RMS."""
    hidden, weight = map(dense, (hidden, weight))
    if _norm_runs_on_triton(hidden, weight, float8_dtype):
        from quaver.kernels import triton_rms_norm

        return triton_rms_norm.cast_axes(hidden, weight, eps, hp_dtype, float8_dtype, rows, columns, power_of_2)
    normed, inverse_rms = _rms_norm(hidden, weight, eps, hp_dtype)
    return *layout_ops.cast_axes(normed, float8_dtype, rows, columns, power_of_2, False)[:6], inverse_rms


def rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, inverse_rms: Tensor) -> Made:
    """The gradients of hidden and of weight."""
    grad, hidden, weight, inverse_rms = map(dense, (grad, hidden, weight, inverse_rms))
    if _norm_runs_on_triton(hidden, weight, torch.float8_e4m3fn, grad, inverse_rms):
        from quaver.kernels import triton_producer_grads

        return triton_producer_grads.rms_norm(grad, hidden, weight, inverse_rms)
    grad_hp, inverse_rms = grad.float(), inverse_rms.unsqueeze(1)
    rows = hidden.float() * inverse_rms
    grad_weight = (grad_hp * rows).sum(0).to(weight.dtype)
    grad_rows = grad_hp * weight.float()
    projection = (grad_rows * rows).mean(1, keepdim=True)
    grad_hidden = ((grad_rows - rows * projection) * inverse_rms).to(hidden.dtype)
    return grad_hidden.contiguous(), grad_weight


def _norm_runs_on_triton(hidden: Tensor, weight: Tensor, float8_dtype: torch.dtype, *others: Tensor) -> bool:
    if not runs_on_triton(float8_dtype, hidden, weight, *others):
        return False
    from quaver.kernels import triton_rms_norm

    return triton_rms_norm.fits(hidden)


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float, hp_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norm of quaver/producers.py, and float32 [R], which PyTorch's operation does not give."""
    normed = F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(hp_dtype)
    return normed, (hidden.float().square().mean(1) + eps).rsqrt()


# ---- what compiled code runs: an operation returns tensors only, so what is not wanted is empty ------------------

_WANTED = "ScalarType float8_dtype, bool rows, bool columns, bool power_of_2"
_NORM = "Tensor hidden, Tensor weight, float eps, ScalarType hp_dtype"
_OPERATIONS: dict[str, tuple[str, int, Callable[..., Made]]] = {
    "swiglu_cast_layouts": (f"Tensor gate, Tensor up, {_WANTED}", 4, swiglu_cast_layouts),
    "swiglu_cast_with_persistent_scale": (
        f"Tensor gate, Tensor up, Tensor quant_scale, {_WANTED}",
        5,
        swiglu_cast_with_persistent_scale,
    ),
    "swiglu_cast_axes": (f"Tensor gate, Tensor up, {_WANTED}", 6, swiglu_cast_axes),
    "swiglu_backward": ("Tensor grad, Tensor gate, Tensor up", 2, swiglu_backward),
    "rms_norm_cast_layouts": (f"{_NORM}, {_WANTED}", 5, rms_norm_cast_layouts),
    "rms_norm_cast_with_persistent_scale": (
        f"{_NORM}, Tensor quant_scale, {_WANTED}",
        6,
        rms_norm_cast_with_persistent_scale,
    ),
    "rms_norm_cast_axes": (f"{_NORM}, {_WANTED}", 7, rms_norm_cast_axes),
    "rms_norm_backward": ("Tensor grad, Tensor hidden, Tensor weight, Tensor inverse_rms", 2, rms_norm_backward),
}


def _operation(function: Callable[..., Made]) -> Callable[..., tuple[Tensor, ...]]:
    def run(first: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(first.new_empty(0) if made is None else made for made in function(first, *args))

    return run


_library = torch.library.Library("quaver", "FRAGMENT")
for _name, (_arguments, _results, _function) in _OPERATIONS.items():
    _library.define(f"{_name}({_arguments}) -> ({', '.join(['Tensor'] * _results)})")
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _operation(_function), _device)


# A fake producer gives what the fake cast of a matrix of its shape gives.


@torch.library.register_fake("quaver::swiglu_cast_layouts")
def _fake_swiglu_cast_layouts(gate: Tensor, up: Tensor, *wanted: Any) -> tuple[Tensor, ...]:
    return torch.ops.quaver.cast_layouts(gate, *wanted, False)[:4]


@torch.library.register_fake("quaver::swiglu_cast_with_persistent_scale")
def _fake_swiglu_cast_with_persistent_scale(
    gate: Tensor, up: Tensor, quant_scale: Tensor, *wanted: Any
) -> tuple[Tensor, ...]:
    made = torch.ops.quaver.cast_layouts_with_persistent_scale(gate, quant_scale, *wanted, False)
    return *made[:4], made[5]


@torch.library.register_fake("quaver::swiglu_cast_axes")
def _fake_swiglu_cast_axes(gate: Tensor, up: Tensor, *wanted: Any) -> tuple[Tensor, ...]:
    return torch.ops.quaver.cast_axes(gate, *wanted, False)[:6]


@torch.library.register_fake("quaver::swiglu_backward")
def _fake_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _fake_inverse_rms(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32)


@torch.library.register_fake("quaver::rms_norm_cast_layouts")
def _fake_rms_norm_cast_layouts(
    hidden: Tensor, weight: Tensor, eps: float, hp_dtype: torch.dtype, *wanted: Any
) -> tuple[Tensor, ...]:
    return *torch.ops.quaver.cast_layouts(hidden, *wanted, False)[:4], _fake_inverse_rms(hidden)


@torch.library.register_fake("quaver::rms_norm_cast_with_persistent_scale")
def _fake_rms_norm_cast_with_persistent_scale(
    hidden: Tensor, weight: Tensor, eps: float, hp_dtype: torch.dtype, quant_scale: Tensor, *wanted: Any
) -> tuple[Tensor, ...]:
    made = torch.ops.quaver.cast_layouts_with_persistent_scale(hidden, quant_scale, *wanted, False)
    return *made[:4], made[5], _fake_inverse_rms(hidden)


@torch.library.register_fake("quaver::rms_norm_cast_axes")
def _fake_rms_norm_cast_axes(
    hidden: Tensor, weight: Tensor, eps: float, hp_dtype: torch.dtype, *wanted: Any
) -> tuple[Tensor, ...]:
    return *torch.ops.quaver.cast_axes(hidden, *wanted, False)[:6], _fake_inverse_rms(hidden)


@torch.library.register_fake("quaver::rms_norm_backward")
def _fake_rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, ...]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)
