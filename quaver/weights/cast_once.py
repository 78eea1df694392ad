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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quaver.experts.module_weight import ModuleWeight, iter_model_weights
from quaver.fsdp.all_gather_weight import is_all_gather_weight
from quaver.fsdp.scaled_shard import AllGatherInputs, ScaledShard, ScaledShardState
from quaver.fsdp.weight_group import get_all_gather_state
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import format_module_name
from quaver.torch_private.tracing import FakeTensor
from quaver.torch_private.versions import get_version


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
            weight.module.cast_once_weights[weight.name] = CastOnceWeight(weight, name, opened_by)
        for name, state, weight in gathered:
            state.cast_once_shards[weight.name] = CastOnceShard(weight, name, opened_by)
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
    state = weight.module.all_gather_state
    return weight.cast_once is not None or (state is not None and weight.name in state.cast_once_shards)


def _is_plain_and_whole(weight: ModuleWeight) -> bool:
    is_plain = type(weight.parameter) in (nn.Parameter, FakeTensor)
    return is_plain and weight.module.all_gather_state is None and weight.is_whole


class _CastOnce:
    """A weight in an open scope, with the name in its errors and the config that it had at the entry."""

    def __init__(self, weight: ModuleWeight, full_name: str, opened_by: str) -> None:
        self._weight, self._config, self._full_name, self.opened_by = weight, weight.config, full_name, opened_by

    def _check_config(self) -> None:
        config = self._weight.config
        if config is not self._config and config != self._config:
            raise self._make_error("given another config")

    def _make_error(self, change: str) -> RuntimeError:
        return RuntimeError(
            f"the weight of {format_module_name(self._full_name)} was {change} inside cast_weights_once; "
            "leave the scope before you change weights or pass others to torch.func.functional_call"
        )


class CastOnceWeight(_CastOnce):
    """The operands of a whole weight while the scope is open, and a check that the weight does not change."""

    @torch.no_grad()
    @torch.inference_mode(False)  # a later forward may train
    def __init__(self, weight: ModuleWeight, full_name: str, opened_by: str) -> None:
        super().__init__(weight, full_name, opened_by)
        self.operands = weight.quantize()
        self._parameter = weight.parameter
        self._memory, self._version = self._parameter.detach(), get_version(self._parameter)

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to afterwards."""
        if weight is not self._parameter:
            raise self._make_error("replaced")
        self._check_config()
        if get_version(weight) != self._version or _get_address(weight) != _get_address(self._memory):  # `.data = ...`
            raise self._make_error("changed")


class CastOnceShard(_CastOnce):
    """This rank's shard of a weight, quantized once while the scope is open, and a check that it does not change."""

    def __init__(self, weight: ModuleWeight, full_name: str, opened_by: str) -> None:
        super().__init__(weight, full_name, opened_by)
        self._inputs: AllGatherInputs | None = None
        self._cast_from: tuple[Tensor, int] | None = None
        """The tensor that was quantized, and its version at that time."""
        self._shard_state: ScaledShardState | None = None
        self._writes = self._version = 0
        self.check()

    def get_all_gather_inputs(self, quantize: Callable[[], AllGatherInputs]) -> AllGatherInputs:
        """Return the inputs of FSDP2's all-gather. The first call makes them by `quantize`."""
        self.check()
        if self._inputs is None:
            wrapped = typing.cast(ScaledShard, self._weight.local_tensor).wrapped
            self._cast_from = wrapped, get_version(wrapped)
            self._inputs = quantize()
        return self._inputs

    def check(self) -> None:
        """Raise RuntimeError if the shard was replaced, written to or given another config since the entry.

        A write that bypasses the parameter, into a tensor of a state_dict, raises only after the cast; before, the cast
        includes it.
        """
        weight, parameter = self._weight.local_tensor, self._weight.parameter
        self._check_config()
        if isinstance(weight, ScaledShard):  # else FSDP2 has unsharded it
            if self._shard_state is None:
                self._shard_state, self._version = weight.shard_state, get_version(parameter)
                self._writes = weight.shard_state.writes
            if weight.shard_state is not self._shard_state:
                raise self._make_error("replaced")
            if get_version(parameter) != self._version:
                raise self._make_error("changed")
        written = self._shard_state is not None and self._shard_state.writes != self._writes
        if written or (self._cast_from is not None and get_version(self._cast_from[0]) != self._cast_from[1]):
            raise self._make_error("changed")


def _get_address(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
