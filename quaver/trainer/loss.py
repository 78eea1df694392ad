"""Next-token cross entropy that converts the logits to float32 one slice of tokens at a time.

Cross entropy in float32 needs three tensors of the logits' size at once: the log-probabilities, saved for backward,
their gradient, and that of the logits. With 128,256 words and 8192 tokens each takes 3.9 GiB, more than a block of
Llama 3 8B. Here the logits are saved in their own dtype and converted one slice at a time; backward converts them again
and writes the gradient of each slice over its logits. The gradient is bit-identical; the loss sums in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SLICE_ELEMENTS = 1 << 25
"""Elements of a slice of the logits: 128 MiB in float32."""

IGNORED = -100
"""The target of tokens that do not count, as in torch."""

_SUM = 2  # torch's number of the reduction
_aten = torch.ops.aten


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy (nats, float32) of `logits` [B, T, vocab] against `targets` [B, T].

    Tokens with the target -100 do not count. If the logits exceed one slice, backward overwrites them.
    """
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    if torch.compiler.is_compiling() or is_traceable_wrapper_subclass(logits) or rows.numel() <= SLICE_ELEMENTS:
        return F.cross_entropy(rows.float(), wanted)
    loss: Tensor = _SlicedCrossEntropy.apply(rows, wanted)
    return loss


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        counted = (targets != IGNORED).sum()
        total = logits.new_zeros((), dtype=torch.float32)
        for rows, wanted in _slices(logits, targets):
            total += F.cross_entropy(rows.float(), wanted, reduction="sum")
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        share = grad / (targets != IGNORED).sum()
        weight = torch.ones_like(share)  # unused by the reduction "sum"
        for rows, wanted in _slices(logits, targets):
            log_probabilities = F.log_softmax(rows.float(), dim=1)
            grads = _aten.nll_loss_backward(share, log_probabilities, wanted, None, _SUM, IGNORED, weight)
            rows.copy_(_aten._log_softmax_backward_data(grads, log_probabilities, 1, torch.float32))
        return logits.detach(), None


def _slices(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield slices of the rows of both, as views."""
    rows = max(1, SLICE_ELEMENTS // logits.shape[1])
    yield from zip(logits.split(rows), targets.split(rows), strict=True)
