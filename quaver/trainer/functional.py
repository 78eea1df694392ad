"""SwiGLU and RMSNorm that save only their inputs for backward, for use in front of float8 linears.

    swiglu(gate, up) = silu(gate) * up                                       saves gate and up
    rms_norm(x)      = x / sqrt(mean(x^2) + eps) * weight                    saves x

A linear in high precision saves its input, and autograd the intermediate results of the expression that computes it. A
float8 linear saves float8 codes of its input, so what lies between two matmuls need not live in high precision: the
backward recomputes it from what both ends have anyway. silu(gate) is then not saved (2 bytes an element), nor the
normalized input in float32, which PyTorch's norm saves on a CPU (4 bytes an element).

Forward results are PyTorch's, to the bit; swiglu's gradients too. Compiled code is the plain expression, because the
compiler decides what to recompute and what to fuse.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate, up: the same shape, floating-point.
    Returns:
        A tensor of their shape and dtype.
    """
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return cast(Tensor, _SwiGLU.apply(gate, up))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """`hidden` over its root mean square along the last dim, times `weight`.

    Args:
        hidden: [..., D], floating-point; computed in its dtype.
        weight: [D], any floating-point dtype.
        eps: added to the mean square.
        out_dtype: of the result; None for hidden's.
    Returns:
        A tensor of hidden's shape.
    """
    out_dtype = out_dtype or hidden.dtype
    if torch.compiler.is_compiling() or not hidden.is_cpu:  # a GPU's kernel saves no more than its input
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)
    return cast(Tensor, _RMSNorm.apply(hidden, weight, eps, out_dtype))


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's RMSNorm of `hidden` [..., D], in its dtype, with all that autograd saves for it."""
    # FSDP2 may gather the weight in fewer bits; fused kernels want one dtype.
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps)


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
