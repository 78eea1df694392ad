"""Next-token cross entropy that converts the logits to float32 one slice of tokens at a time.

Cross entropy in float32 needs three tensors of the logits' size at once: the log-probabilities, which are saved for
backward, their gradient, and the gradient of the logits. With 128,256 words and 8192 tokens each takes 3.9 GiB, more
than a block of Llama 3 8B. Here the logits are saved in their dtype and converted one slice at a time; backward
converts them again and overwrites each slice with its gradient. The gradient is bit-identical to torch's; the loss is
summed in another order.

[Note: split vocabulary] Under tensor parallelism each rank has the logits of its part of the vocabulary. Per token it
contributes its largest logit, the sum of exponentials relative to it, and the target's logit if it has that: one
all-gather of 12 bytes a token and rank, for all slices together. Every rank computes the same loss from the same
numbers. Backward saves two numbers a token and communicates nothing. A maximum by all-reduce would lose a NaN on some
backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quaver.runtime.collectives import all_gather
from quaver.torch_private.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

SLICE_ELEMENTS = 1 << 25
"""Elements of a slice of the logits: 128 MiB in float32."""

IGNORE_INDEX = -100
"""The target of tokens that do not count, as in torch."""

_SUM_REDUCTION = 2  # torch's number of the reduction
_aten = torch.ops.aten


def compute_next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy (nats, float32) of `logits` [B, T, vocab] against `targets` [B, T].

    Tokens with the target -100 do not count. Logits of more than one slice are overwritten by backward.

    Args:
        logits: a DTensor that is sharded along the vocabulary over a mesh of one dim is not gathered: see [Note: split
            vocabulary]. All its ranks call this together, with the same targets. Backward overwrites its logits.
        targets: a target outside of the vocabulary makes the loss NaN if the vocabulary is split, and otherwise raises
            what `F.cross_entropy` raises.
    """
    if _is_split(logits):
        return _compute_split_loss(logits, targets)
    rows, row_targets = logits.flatten(0, 1), targets.flatten()
    if torch.compiler.is_compiling() or is_traceable_wrapper_subclass(logits) or rows.numel() <= SLICE_ELEMENTS:
        return F.cross_entropy(rows.float(), row_targets)
    return _SlicedCrossEntropy.apply(rows, row_targets)


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        token_count = (targets != IGNORE_INDEX).sum()
        total = logits.new_zeros((), dtype=torch.float32)
        for rows, row_targets in _iter_slices(logits, targets):
            total += F.cross_entropy(rows.float(), row_targets, reduction="sum")
        return total / token_count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        grad_per_token = grad / (targets != IGNORE_INDEX).sum()
        weight = torch.ones_like(grad_per_token)  # unused by the reduction "sum"
        for rows, row_targets in _iter_slices(logits, targets):
            log_probabilities = F.log_softmax(rows.float(), dim=1)
            grads = _aten.nll_loss_backward(
                grad_per_token, log_probabilities, row_targets, None, _SUM_REDUCTION, IGNORE_INDEX, weight
            )
            rows.copy_(_aten._log_softmax_backward_data(grads, log_probabilities, 1, torch.float32))
        return logits.detach(), None


def _iter_slices(logits: Tensor, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield slices of rows of `logits` and `vectors`, as views; nothing if the logits have no columns."""
    if logits.shape[1]:
        rows = max(1, SLICE_ELEMENTS // logits.shape[1])
        yield from zip(*(tensor.split(rows) for tensor in (logits, *vectors)), strict=True)


def _is_split(logits: Tensor) -> TypeIs[DTensor]:
    if not is_dtensor(logits) or logits.device_mesh.ndim > 1:
        return False
    return logits.placements[0].is_shard(logits.ndim - 1)


def _compute_split_loss(logits: DTensor, targets: Tensor) -> Tensor:
    mesh, vocab_size = logits.device_mesh, logits.shape[-1]
    vocab_start = mesh.get_local_rank() * -(-vocab_size // mesh.size())  # Shard splits as torch.chunk does
    local_logits = logits.to_local().flatten(0, 1)
    return _SplitCrossEntropy.apply(local_logits, targets.flatten(), vocab_start, vocab_size, mesh.get_group())


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of `logits` [tokens, columns of this rank]; column 0 is token `vocab_start` of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, group: ProcessGroup
    ) -> Tensor:
        reduced = _reduce_logits(logits, targets - vocab_start)
        rank_max, rank_sum, rank_target = all_gather(reduced, 0, group).unflatten(0, (-1, len(reduced))).unbind(1)
        max_logit = rank_max.amax(0)
        exp_sum = (rank_sum * (rank_max - max_logit).exp()).sum(0)
        ctx.save_for_backward(logits, targets, max_logit, exp_sum)
        ctx.vocab_start = vocab_start
        is_counted = targets != IGNORE_INDEX
        losses = torch.where(is_counted, max_logit - rank_target.sum(0) + exp_sum.log(), 0)
        is_outside = is_counted & ((targets < 0) | (targets >= vocab_size))
        return losses.masked_fill(is_outside, torch.nan).sum() / is_counted.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, max_logit, exp_sum = ctx.saved_tensors
        is_counted = targets != IGNORE_INDEX
        grad_losses = torch.where(is_counted, grad / is_counted.sum(), 0)
        # Dynamo does not trace a backward that writes over what the forward saved.
        grad_logits = torch.empty_like(logits) if torch.compiler.is_compiling() else logits
        vectors = targets - ctx.vocab_start, max_logit, grad_losses / exp_sum, grad_losses
        for rows, *vectors_of_slice, result in _iter_slices(logits, *vectors, grad_logits):
            result.copy_(_compute_gradient(rows, *vectors_of_slice))
        return grad_logits.detach(), None, None, None, None


def _reduce_logits(logits: Tensor, row_targets: Tensor) -> Tensor:
    """Return the largest logit of each row, the sum of exponentials relative to it, and the target's logit or 0.

    float32 [3, rows]. A rank without logits has a largest logit of -inf and a sum of 0.
    """
    reduced = logits.new_zeros((3, len(row_targets)), dtype=torch.float32)
    reduced[0] = -torch.inf
    for rows, columns, max_logit, exp_sum, target_logit in _iter_slices(logits, row_targets, *reduced):
        max_logit.copy_(rows.amax(1))
        base = max_logit.masked_fill(max_logit == -torch.inf, 0)  # -inf - -inf would be NaN
        exp_sum.copy_((rows - base[:, None]).exp_().sum(1))
        index, is_local = _locate_targets(columns, rows)
        target_logit.copy_(torch.where(is_local, rows.gather(1, index), 0)[:, 0])
    return reduced


def _compute_gradient(
    rows: Tensor, row_targets: Tensor, max_logit: Tensor, factor: Tensor, grad_loss: Tensor
) -> Tensor:
    """Return the gradient of a slice in float32: (softmax(rows) - one_hot(row_targets)) * grad_loss.

    `factor` [rows] is grad_loss / sum(exp(logits - max_logit)) over the whole vocabulary. The first term is
    exp(rows - max_logit) * factor.
    """
    grads = (rows - max_logit[:, None]).exp_().mul_(factor[:, None])
    index, is_local = _locate_targets(row_targets, rows)
    return grads.scatter_(1, index, grads.gather(1, index) - torch.where(is_local, grad_loss[:, None], 0))


def _locate_targets(row_targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of each row's target, or 0 if another rank has it, and whether it is here; both [rows, 1]."""
    is_local = (row_targets >= 0) & (row_targets < rows.shape[1])
    return torch.where(is_local, row_targets, 0)[:, None], is_local[:, None]
