"""Reduces the gradients of a step's microbatches over the ranks, after each or after the last, and adds them up.

    training.reduce    after each microbatch                    after the last    held meanwhile, per parameter
    every              reduce-scatter, all-reduce of replicas                    the shard's sum in training.dtype
    last_all_reduce    reduce-scatter                          all-reduce        the shard's sum in float32
    last                                                       both              the whole sum in float32

"last" and "last_all_reduce" add up in float32, in place: bfloat16 rounds 256 + 1 to 256. FSDP2 does that for
sharded parameters. For other bfloat16 parameters (one process, tensor parallelism alone) the hooks here do it. Each sum
is rounded to the parameter's dtype once. With fsdp_reshard_after_forward = never the weights of "last" stay gathered
from the first forward to the last backward: one all-gather a step.

`set_is_last_backward` stays True: after a backward without a reduction nothing is pending, and FSDP2 then forgets the
order of this forward, which it needs for prefetching.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from quaver.lab.settings import TrainConfig

_Batch = TypeVar("_Batch")


@contextmanager
def accumulate_gradients(model: nn.Module, config: TrainConfig, batches: list[_Batch]) -> Iterator[Iterable[_Batch]]:
    """Yield the microbatches of one step. Run forward and backward of each before taking the next.

    At the exit every `.grad` has the dtype of its parameter. Every rank must pass the same number of batches.
    """
    reduce = config.training.reduce
    if reduce == "every":
        yield batches
    elif isinstance(model, FSDPModule):
        stays_gathered = reduce == "last" and config.parallelism.fsdp_reshard_after_forward == "never"
        try:
            yield _iter_reducing_last(model, batches, reduce, stays_gathered)
        finally:  # also after an error, for an evaluation
            _set_reduction(model, reduce, stays_gathered=stays_gathered, is_last=True)
    else:
        with _sum_in_float32(model):
            yield batches


def _iter_reducing_last(
    model: FSDPModule, batches: list[_Batch], reduce: str, stays_gathered: bool
) -> Iterator[_Batch]:
    for number, batch in enumerate(batches, 1):
        _set_reduction(model, reduce, stays_gathered=stays_gathered, is_last=number == len(batches))
        yield batch


def _set_reduction(model: FSDPModule, reduce: str, *, stays_gathered: bool, is_last: bool) -> None:
    if reduce == "last_all_reduce":
        model.set_requires_all_reduce(is_last)
        return
    model.set_requires_gradient_sync(is_last)
    if stays_gathered:
        model.set_reshard_after_backward(is_last)


@contextmanager
def _sum_in_float32(model: nn.Module) -> Iterator[None]:
    """Add up the gradients of bfloat16 parameters in float32 in the block."""
    float32_grads: dict[Tensor, Tensor] = {}

    def add_in_float32(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and parameter in float32_grads:
            float32_grads[parameter].add_(grad)
        elif grad is not None:
            float32_grads[parameter] = grad.float()

    weights = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype != torch.float32]
    hooks = [weight.register_post_accumulate_grad_hook(add_in_float32) for weight in weights]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    while float32_grads:  # frees each sum as soon as its rounded copy exists
        parameter, grad = float32_grads.popitem()
        parameter.grad = grad.to(parameter.dtype)
