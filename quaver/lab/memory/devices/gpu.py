"""The device that predictions are for: a CPU, or an NVIDIA GPU with float8 matmuls that this machine lacks.

A torch build without CUDA cannot differentiate fake CUDA tensors. So fake tensors stay on the CPU and quaver runs its
GPU code on them (`simulate_gpu`): casts write the layouts of the hardware's matmuls, and every kind of scales that
some hardware multiplies is multiplied natively.

torch's C++ still decides as for a CPU, except for RMSNorm and the rules of autocast (autocast.py). Attention is the
CPU's flash attention. It saves the same tensors as the GPU's kernels, FlashAttention-2 and cuDNN, except two numbers
of RNG state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.native_mm import ScaleKind
from quaver.lab.memory.devices.autocast import cast_to_float32, has_gpu_rule, use_gpu_autocast
from quaver.linear.backends import replace_trial_results
from quaver.runtime.devices import simulate_gpu
from quaver.torch_private.dispatch import implement_operators
from quaver.torch_private.replacing import replace_attribute

DEVICES = ("cpu", "cuda")
_SIMULATED_CAPABILITY = (9, 0)


@contextmanager
def simulate_float8_gpu() -> Iterator[None]:
    """Treat fake tensors inside the block as tensors on a GPU that multiplies the scales of every recipe."""
    with ExitStack() as stack:
        stack.enter_context(simulate_gpu(_SIMULATED_CAPABILITY))
        stack.enter_context(replace_trial_results(dict.fromkeys(ScaleKind)))
        stack.enter_context(use_gpu_autocast())
        stack.enter_context(replace_attribute(F, "rms_norm", _rms_norm))
        library = stack.enter_context(implement_operators("aten"))
        # compiled code calls this overload, and torch has a fake implementation only for the default one
        library.impl("_scaled_mm.out", _scaled_mm_out, "Meta")
        yield


def _scaled_mm_out(*operands: Any, out: Tensor, **options: Any) -> Tensor:
    return out


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute torch.nn.functional.rms_norm as on a GPU, where it is one kernel, not several operators as on a CPU.

    The compiler decomposes it on both, so it gets the real computation. An empty result would let it drop the backward.
    """
    if torch.compiler.is_compiling():
        return torch.rms_norm(input, list(normalized_shape), weight, eps)
    if torch.is_autocast_enabled("cpu") and has_gpu_rule("rms_norm"):
        input, weight = cast_to_float32((input, weight))
    return _FusedRMSNorm.apply(input, weight, len(normalized_shape))


class _FusedRMSNorm(torch.autograd.Function):
    """Saves the same tensors as aten::_fused_rms_norm: its input, the weight and one number for each row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        inverse_rms = input.new_empty(*input.shape[: input.dim() - dims], *[1] * dims, dtype=dtype)
        ctx.save_for_backward(input, weight, inverse_rms)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        grad_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        return grad_input, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None
