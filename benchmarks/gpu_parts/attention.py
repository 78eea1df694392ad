"""Times torch's kernels of attention, the largest part of a block that is not float8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_parts.part_context import Call, PartContext, Row, catch_failures, make_timing_row


def time_attention(context: PartContext) -> Iterator[Row]:
    """Time causal attention with the model's heads, forward and forward with backward: flash, cuDNN, torch's choice."""
    model = context.model
    sizes = context.tokens // context.seq_len, model.n_heads, context.seq_len, model.head_dim
    query, key, value = (context.randn(*sizes).requires_grad_() for _ in range(3))
    direction = context.randn(*sizes)
    second = SDPBackend.MATH if context.dry else SDPBackend.CUDNN_ATTENTION
    backends = {"flash": [SDPBackend.FLASH_ATTENTION], second.name.lower(): [second], "torch's choice": []}
    yield from catch_failures(
        ({"what": name}, partial(_time_backend, context, (query, key, value), direction, backend))
        for name, backend in backends.items()
    )


def _time_backend(
    context: PartContext, operands: tuple[Tensor, Tensor, Tensor], direction: Tensor, backend: list[SDPBackend]
) -> Iterator[Row]:
    def run_forward() -> Tensor:
        if not backend:
            return F.scaled_dot_product_attention(*operands, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*operands, is_causal=True)

    def run_both_passes() -> None:
        for operand in operands:
            operand.grad = None
        run_forward().backward(direction)

    calls: dict[str, Call] = {"forward": run_forward, "forward and backward": run_both_passes}
    batch, heads, length, width = operands[0].shape
    products = 2 * batch * heads * length * length * width  # of both matmuls, half of which the mask leaves out
    for name, measured in context.time(calls, rounds=10).items():
        # The forward has two matmuls. The backward has five, one of them recomputed.
        flops = products if name == "forward" else 3.5 * products
        yield {"calls": name, "timing": make_timing_row(measured), "tflops": 1e-6 * flops / measured.median_us}
