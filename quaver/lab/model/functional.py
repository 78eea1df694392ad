"""SwiGLU and RMSNorm that save only their inputs for backward, and an embedding whose gradient is summed in float32.

    swiglu(gate, up) = silu(gate) * up                                       saves gate and up
    rms_norm(x)      = x / sqrt(mean(x^2) + eps) * weight                    saves x

A high-precision linear saves its input, and autograd saves the intermediate results that compute it. A float8 linear
saves float8 codes instead, so the tensors between two matmuls need not be saved: backward recomputes them. That saves
silu(gate) (2 bytes per element) and the normalized input in float32 (4 bytes per element), which PyTorch's RMSNorm
keeps on a CPU.

Forward results, and swiglu's gradients, are bit-identical to PyTorch's. Compiled code is the plain expression, because
the compiler decides what to recompute and to fuse. Double backward is unsupported, as in a float8 linear.

    embedding(tokens, weight)[t] = weight[tokens[t]]                         saves tokens

On a CPU PyTorch sums the gradient of a bfloat16 weight in bfloat16 (an SQNR of 20 dB for 8192 tokens among 256 words).
This embedding sums in float32, as a GPU does.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.runtime.devices import is_cpu
from quaver.torch_private.dtensor import is_dtensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, for floating-point tensors of the same shape and dtype."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return typing.cast(Tensor, _SwiGLU.apply(gate, up))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return `hidden` divided by its root mean square along the last dim, times `weight`.

    Args:
        hidden: [..., D], floating-point; the computation runs in its dtype.
        weight: [D], any floating-point dtype.
        eps: added to the mean square.
        out_dtype: the dtype of the result; None keeps the dtype of `hidden`.
    """
    out_dtype = out_dtype or hidden.dtype
    if torch.compiler.is_compiling() or not _is_cpu(hidden):  # CUDA's kernel saves only its input
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)
    return typing.cast(Tensor, _RMSNormFunction.apply(hidden, weight, eps, out_dtype))


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return PyTorch's RMSNorm of `hidden` [..., D] in its dtype, also under autocast.

    Autocast on a GPU would save a float32 copy of a bfloat16 input, and the kernel computes in float32 without one. On
    a CPU autograd saves intermediate results.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        # FSDP2 may gather the weight in fewer bits; fused kernels require one dtype.
        return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows `tokens` (int64, any shape) of `weight` [V, D]; the gradient is summed in float32 or wider."""
    if weight.dtype.itemsize >= torch.float32.itemsize or not _is_cpu(weight):
        return F.embedding(tokens, weight)
    return typing.cast(Tensor, _EmbeddingFunction.apply(tokens, weight))


def _is_cpu(tensor: Tensor) -> bool:
    # Memory prediction treats fake CPU tensors as GPU tensors, but has no GPU kernels for DTensors.
    return tensor.is_cpu if is_dtensor(tensor) else is_cpu(tensor)


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab_size, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        grad_weight = torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.vocab_size, -1, False)
        return None, grad_weight.to(ctx.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        if ctx.needs_input_grad[1]:
            grad_up = F.silu(gate).mul_(grad)
        return grad_gate, grad_up


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return plain_rms_norm(hidden, weight, eps).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
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
