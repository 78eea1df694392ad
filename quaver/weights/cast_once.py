"""`cast_weights_once`: quantize each float8 weight once for all microbatches of one optimizer step.

Outside the scope a float8 module quantizes its weight at each use, because version counters miss some writes (`.data`,
an in-place kernel, an optimizer that bypasses them). Inside, the caller promises not to change the weights, and a
change that torch can see raises.

A whole weight is quantized at the entry. A shard that FSDP2 all-gathers in float8 is quantized for its first all-gather
in the scope, because its scale needs a collective; later all-gathers send the same codes. The model may be in train or
eval mode then: with a persistent scale, each forward that trains records the amax of that cast ([Note: who records] in
linear/scale_state.py).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quaver.experts.module_weight import ModuleWeight, iter_model_weights
from quaver.fsdp.all_gather_weight import is_all_gather_weight
from quaver.fsdp.cast_once_shard import CastOnceShard
from quaver.fsdp.weight_group import AllGatherState, get_all_gather_state
from quaver.linear.cast_once_weight import CastOnceWeight
from quaver.runtime.errors import check_is_module
from quaver.torch_private.tracing import FakeTensor


@contextmanager
def cast_weights_once(model: nn.Module) -> Iterator[None]:
    """Quantize every weight of the float8 linears and experts of `model` once in the block, for both its matmuls.

    The block contains the microbatches (forward and backward) of one optimizer step, eager or compiled, and ends before
    the optimizer steps. While it is open the codes take one byte per element and layout. Under FSDP2 with float8
    all-gather each rank quantizes its shard once, keeps the codes, and sends them in every all-gather.

    The scope ignores weights of high-precision modules, weights that are all-gathered in high precision, and weights
    that only FSDP1 or only tensor parallelism shards. A torch checkpoint around eager modules may run its backward
    after the exit. It then multiplies by the codes of its forward.

    Args:
        model: a model with float8 modules, wrapped or not.
    Raises:
        RuntimeError: the scope is already open for one of the modules; or a weight was changed, replaced or given
            another config inside it, which raises at the next eager use, at the next all-gather, or at the exit.
    """
    with open_scope(model, opened_by=""):
        yield


@contextmanager
def open_scope(model: nn.Module, *, opened_by: str) -> Iterator[None]:
    """Run `cast_weights_once`. The error of a second scope names `opened_by`, unless it is empty.

    The error about a weight has its `full_name` in `model`.
    """
    check_is_module(model, argument="model")
    weights = list(iter_model_weights(model))
    whole = [(name, weight) for name, weight in weights if _is_plain_and_whole(weight)]
    gathered = [
        (name, get_all_gather_state(weight.module), weight) for name, weight in weights if is_all_gather_weight(weight)
    ]
    openers = {weight.cast_once.opened_by for _, weight in whole if weight.cast_once is not None}
    openers |= {shard.opened_by for _, state, _ in gathered for shard in state.cast_once_shards.values()}
    if openers:
        names = ", ".join(sorted(filter(None, openers)))
        raise RuntimeError(
            f"cast_weights_once is already open for this model{names and f', opened by {names}'}; leave it before "
            "you enter it again"
        )
    try:
        for name, weight in whole:
            with torch.no_grad(), torch.inference_mode(False):  # a later forward may train
                cast_once = CastOnceWeight(
                    weight.module, weight.name, weight.quantize(), full_name=name, opened_by=opened_by
                )
            weight.module.cast_once_weights[weight.name] = cast_once
        for name, state, weight in gathered:
            state.cast_once_shards[weight.name] = CastOnceShard(weight, full_name=name, opened_by=opened_by)
        yield
        for _, weight in whole:
            if weight.cast_once is not None:
                weight.cast_once.check(weight.parameter)
        for _, state, _ in gathered:
            for shard in state.cast_once_shards.values():
                shard.check()
    finally:
        for _, weight in whole:
            weight.module.cast_once_weights.pop(weight.name, None)
            if weight.scale_slots is not None:
                weight.scale_slots.recorded_weight_amax = None
        for _, state, _ in gathered:
            state.cast_once_shards.clear()


def is_cast_once(weight: ModuleWeight) -> bool:
    """Return whether a `cast_weights_once` is open for this weight."""
    state = typing.cast(AllGatherState | None, weight.module.all_gather_state)
    return weight.cast_once is not None or (state is not None and weight.name in state.cast_once_shards)


def _is_plain_and_whole(weight: ModuleWeight) -> bool:
    is_plain = type(weight.parameter) in (nn.Parameter, FakeTensor)
    return is_plain and weight.module.all_gather_state is None and weight.is_whole
