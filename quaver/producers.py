"""What computes the inputs of float8 linears, SwiGLU and RMSNorm, and keeps no more than it was given.

    swiglu(gate, up) = silu(gate) * up                                       keeps gate and up
    rms_norm(x)      = x / sqrt(mean(x^2) + eps) * weight                    keeps x and one number a row

A linear in high precision keeps its input, and autograd the intermediate results of the expression that computes it. A
float8 linear keeps its input as float8, so that nothing of what lies between two matmuls has to live in high precision:
the backward computes it again from what both ends have anyway. silu(gate) is then not kept (2 bytes an element), nor
the normalized input in float32, which PyTorch's norm keeps on a CPU (4 bytes an element).

Told which linears read the result (`readers`), both cast it as they compute it, where the layouts of casts matter
(`MatrixCasts.lays_out`: eager code on hardware that multiplies float8): it is then not even written. Where a reader is
no float8 linear, is sharded by tensor parallelism, or needs its input in high precision, the result is a tensor.

Forward results are PyTorch's, to the bit; swiglu's gradients too. Compiled code is the plain expression, since the
compiler decides by itself what to compute again and what to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.casts import CastInput, MatrixCasts, Operand, Operands
from quaver.config import Float8LinearConfig
from quaver.kernels import fused_producers
from quaver.kernels.cast import record
from quaver.kernels.layouts import AxisCasts, LayoutCast
from quaver.linear import Float8Linear
from quaver.scaling import PersistentScale


def swiglu(gate: Tensor, up: Tensor, *, readers: Sequence[nn.Module] = ()) -> Tensor | CastInput:
    """`silu(gate) * up`, with their shape and dtype.

    Args:
        gate, up: the same shape, floating-point.
        readers: every linear that will be given the result, and nothing else will be.
    Returns:
        A tensor; or, with `readers`, what those take in its place.
    """
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    how = _how_to_cast(readers, gate, gate.dtype)
    if how is None:
        return _SwiGLU.apply(gate, up)
    made: list[Operands] = []
    stand_in = _SwiGLUIntoFloat8.apply(gate, up, how, made)
    return CastInput(stand_in, made.pop(), how.config)


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None = None,
    *,
    readers: Sequence[nn.Module] = (),
) -> Tensor | CastInput:
    """`hidden` over its root mean square along the last dim, times `weight`.

    Args:
        hidden: [..., D], floating-point; computed in its dtype.
        weight: [D], any floating-point dtype.
        eps: added to the mean square.
        out_dtype: of the result; None for hidden's.
        readers: every linear that will be given the result, and nothing else will be.
    Returns:
        A tensor of hidden's shape; or, with `readers`, what those take in its place.
    """
    out_dtype = out_dtype or hidden.dtype
    if torch.compiler.is_compiling():
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)
    how = _how_to_cast(readers, hidden, out_dtype)
    if how is not None:
        made: list[Operands] = []
        stand_in = _RMSNormIntoFloat8.apply(hidden, weight, eps, how, made)
        return CastInput(stand_in, made.pop(), how.config)
    if not hidden.is_cpu:  # a GPU's kernel keeps no more
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)
    return _RMSNorm.apply(hidden, weight, eps, out_dtype)


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's RMSNorm of `hidden` [..., D], in its dtype, with all that autograd keeps for it."""
    # FSDP2 may gather the weight in fewer bits; fused kernels want one dtype.
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps)


# ---- in high precision -----------------------------------------------------------------------------------------------


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # differentiated again: by the formula, which autograd can follow
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), grad, create_graph=True)
        if not gate.is_cpu and all(ctx.needs_input_grad):
            return _swiglu_gradients(grad, gate, up)
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        if ctx.needs_input_grad[1]:
            grad_up = F.silu(gate).mul_(grad)
        return grad_gate, grad_up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # differentiated again: by the formula, which autograd can follow
            normed = plain_rms_norm(hidden, weight, ctx.eps)
            return *torch.autograd.grad(normed, (hidden, weight), grad.to(normed.dtype), create_graph=True), None, None
        hp_dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden_hp, grad_hp = hidden.to(hp_dtype), grad.to(hp_dtype)
        inverse_rms = (hidden_hp.square().mean(-1, keepdim=True) + ctx.eps).rsqrt_()
        rows = hidden_hp * inverse_rms
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_hp * rows).sum(tuple(range(grad.dim() - 1))).to(weight.dtype)
        grad_rows = grad_hp * weight
        projection = (grad_rows * rows).mean(-1, keepdim=True)
        grad_hidden = grad_rows.sub_(rows.mul_(projection)).mul_(inverse_rms)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


# ---- into float8 -----------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """How the readers of a result have it cast."""

    config: Float8LinearConfig
    hp_dtype: torch.dtype
    columns: bool
    """Whether a backward will read it too, for grad_weight."""
    kept: PersistentScale | None


def _how_to_cast(readers: Sequence[nn.Module], source: Tensor, hp_dtype: torch.dtype) -> _How | None:
    """How the readers all want the result cast; None where one of them needs it as a tensor, or they differ."""
    if not readers:
        return None
    linears = [reader for reader in readers if isinstance(reader, Float8Linear) and reader.sharding is None]
    if len(linears) < len(readers) or source.numel() == 0:
        return None
    config = linears[0].config
    last, first = config.casts.input, config.casts.input_for_grad_weight
    is_one_kernel = not last.is_disabled and last == first and MatrixCasts(config, hp_dtype).lays_out(source)
    if not is_one_kernel or any(linear.config is not config for linear in linears):
        return None
    kept = {id(each): each for each in (linear.kept_scales(source.device).input for linear in linears)}
    if len(kept) > 1:
        return None
    columns = any(linear.weight.requires_grad for linear in linears) and torch.is_grad_enabled()
    return _How(config, hp_dtype, columns, next(iter(kept.values())))


def _cast(
    how: _How, layouts: Callable[..., Any], with_kept_scale: Callable[..., Any], axes: Callable[..., Any]
) -> tuple[Operands, tuple[Tensor, ...]]:
    """The operands that readers take, and what else the kernel gave; `layouts`, ... are the casts of one producer."""
    cast = how.config.casts.input
    wanted = {"rows": True, "columns": how.columns, "power_of_2": how.config.round_scales_to_power_of_2}
    if cast.is_rowwise:
        made, *rest = _tuple(axes(cast.float8_dtype, **wanted))
    elif how.kept is None:
        made, *rest = _tuple(layouts(cast.float8_dtype, **wanted))
    else:
        made, observed, *rest = with_kept_scale(how.kept.quant_scale, cast.float8_dtype, **wanted)
        record(how.kept, observed)
    return _operands(made), tuple(rest)


def _tuple(made: Any) -> tuple[Any, ...]:
    return (made,) if isinstance(made, (LayoutCast, AxisCasts)) else made


def _operands(made: LayoutCast | AxisCasts) -> Operands:
    if isinstance(made, AxisCasts):
        axes = (made.rows, made.columns)
        last, first = (None if each is None else Operand(each.codes, each.dequant_scale) for each in axes)
        return Operands(last, first)
    codes = (made.row_codes, made.column_codes)
    last, first = (None if each is None else Operand(each, made.dequant_scale) for each in codes)
    return Operands(last, first)


def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _SwiGLUIntoFloat8(torch.autograd.Function):
    """The product as its readers' operands, which `made` gets; the result stands for it and takes no memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: _How, made: list[Operands]) -> Tensor:
        ctx.save_for_backward(gate, up)
        rows = _rows(gate), _rows(up)
        operands, _ = _cast(
            how,
            partial(fused_producers.swiglu_cast_layouts, *rows),
            partial(fused_producers.swiglu_cast_with_persistent_scale, *rows),
            partial(fused_producers.swiglu_cast_axes, *rows),
        )
        made.append(operands)
        return _stand_in(gate.shape, gate.dtype, gate.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return *_swiglu_gradients(grad, *ctx.saved_tensors), None, None


def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grads = fused_producers.swiglu_backward(_rows(grad), _rows(gate), _rows(up))
    return grads[0].view(gate.shape), grads[1].view(gate.shape)


class _RMSNormIntoFloat8(torch.autograd.Function):
    """The norm as its readers' operands, which `made` gets; the result stands for it and takes no memory."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, how: _How, made: list[Operands]) -> Tensor:
        rows = _rows(hidden)
        given = (rows, weight, eps, how.hp_dtype)
        operands, (inverse_rms,) = _cast(
            how,
            partial(fused_producers.rms_norm_cast_layouts, *given),
            partial(fused_producers.rms_norm_cast_with_persistent_scale, *given),
            partial(fused_producers.rms_norm_cast_axes, *given),
        )
        ctx.save_for_backward(hidden, weight, inverse_rms)
        made.append(operands)
        return _stand_in(hidden.shape, how.hp_dtype, hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, inverse_rms = ctx.saved_tensors
        with torch.no_grad():
            grads = fused_producers.rms_norm_backward(_rows(grad), _rows(hidden), weight, inverse_rms)
        return grads[0].view(hidden.shape), grads[1], None, None, None
