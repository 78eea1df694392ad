"""Has quaver's code run on fake tensors as it would on a GPU that multiplies float8, where there is none.

Fake tensors of a GPU cannot be differentiated by a torch that was built without one. So they stay a CPU's, and say that
they are a GPU's to Python code that asks (`is_cpu`, `is_cuda`): quaver's casts then write the layouts that hardware
reads, its norms and SwiGLU go into float8 at once (producers.py), and matmuls are the hardware's. Where a dispatch mode
looks on, as one does here, their kernels are operations (layout_ops.py), whose fakes return what the kernels return.

What torch's own C++ decides by device stays a CPU's, but for RMSNorm: attention is its flash attention for CPUs, which
keeps what that of GPUs keeps, but for two numbers of its random state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import quaver.gemm
from quaver.gemm import GemmBackend

_plain_rms_norm = torch.rms_norm
"""What torch.nn.functional.rms_norm calls."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside the block quaver takes fake tensors for those of an NVIDIA GPU with float8 matmuls, Hopper or later."""
    with ExitStack() as stack:
        for owner, name, value in (
            (FakeTensor, "is_cpu", property(lambda _: False)),
            (FakeTensor, "is_cuda", property(lambda _: True)),
            (quaver.gemm, "backend_for", _backend_for),
            (F, "rms_norm", _rms_norm),
        ):
            stack.enter_context(_replaced(owner, name, value))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        # what compiled code calls; torch has a fake of the other overload only
        library.impl("_scaled_mm.out", _scaled_mm_out, "Meta")
        yield


def _scaled_mm_out(*operands: Any, out: Tensor, **options: Any) -> Tensor:
    return out


def _backend_for(device: torch.device, *, rowwise: bool, emulate: bool = False) -> GemmBackend:
    return GemmBackend.EXACT if emulate else GemmBackend.NATIVE


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm of a GPU, which is one kernel there; on a CPU it is made of many operators.

    A compiler takes it apart on both, and is given all that it is computed from: what depends on nothing that the
    backward has computed would have it leave that out.
    """
    if torch.compiler.is_compiling():
        return _plain_rms_norm(input, list(normalized_shape), weight, eps)
    output: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))
    return output


class _FusedRMSNorm(torch.autograd.Function):
    """What aten::_fused_rms_norm keeps, its input and a number for each row, and what it and its backward return."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        inverse_rms = input.new_empty(*input.shape[: input.dim() - dims], *[1] * dims)
        ctx.save_for_backward(input, weight, inverse_rms)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        grad_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        return grad_input, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner` has `value` as its attribute inside the block, and afterwards what it had of its own before."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
