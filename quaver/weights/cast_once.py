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
from quaver.fsdp.gathered import AllGatherInputs, Float8AllGatherWeight, is_all_gather_weight
from quaver.fsdp.scaled_shard import ShardState
from quaver.fsdp.siblings import AllGatherState, get_all_gather_state
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.errors import check_is_module
from quaver.torch_private.tracing import FakeTensor
from quaver.torch_private.versions import get_version


class PreparedWeight:
    """The operands of a weight while the scope is open, and a check that the weight does not change."""

    def __init__(self, weight: ModuleWeight, holder: str) -> None:
        self.operands, self.holder = weight.quantize(), holder
        self._module_weight, self._config = weight, weight.config
        self._weight, self._memory = weight.parameter, weight.parameter.detach()
        self._version = get_version(self._weight)

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to afterwards."""
        if weight is not self._weight:
            raise make_scope_error(weight, "replaced")
        _check_config(self._module_weight, self._config)
        if get_version(weight) != self._version or _get_address(weight) != _get_address(self._memory):  # `.data = ...`
            raise make_scope_error(weight, "changed")


def _check_config(weight: ModuleWeight, config: Float8LinearConfig) -> None:
    if weight.config is not config and weight.config != config:
        raise make_scope_error(weight.parameter, "given another config")


def _get_address(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def make_scope_error(weight: Tensor, how: str) -> RuntimeError:
    """Make the error for a weight that was "changed", "replaced" or "given another config" (`how`)."""
    return RuntimeError(
        f"a weight of shape {list(weight.shape)} was {how} inside cast_weights_once; "
        "leave the scope before you change weights or pass others to torch.func.functional_call"
    )


class CastOnceShard:
    """This rank's shard of a weight, quantized once while the scope is open, and a check that it does not change."""

    def __init__(self, weight: ModuleWeight, holder: str) -> None:
        self._weight, self._config, self.holder = weight, weight.config, holder
        self._inputs: AllGatherInputs | None = None
        self._cast_from: tuple[Tensor, int] | None = None
        """The tensor that was quantized, and its version at that time."""
        self._shard_state: ShardState | None = None
        self._writes = self._version = 0
        self.check()

    def get_all_gather_inputs(self, quantize: Callable[[], AllGatherInputs]) -> AllGatherInputs:
        """Return the inputs of FSDP2's all-gather. The first call makes them by `quantize`."""
        self.check()
        if self._inputs is None:
            wrapped = typing.cast(Float8AllGatherWeight, self._weight.local).wrapped
            self._cast_from = wrapped, get_version(wrapped)
            self._inputs = quantize()
        return self._inputs

    def check(self) -> None:
        """Raise RuntimeError if the shard was replaced, written to or given another config since the entry.

        A write that bypasses the parameter, into a tensor of a state_dict, raises only after the cast; before, the cast
        includes it.
        """
        weight, parameter = self._weight.local, self._weight.parameter
        _check_config(self._weight, self._config)
        if isinstance(weight, Float8AllGatherWeight):  # else FSDP2 has unsharded it
            if self._shard_state is None:
                self._shard_state, self._version = weight.shard_state, get_version(parameter)
                self._writes = weight.shard_state.writes
            if weight.shard_state is not self._shard_state:
                raise make_scope_error(parameter, "replaced")
            if get_version(parameter) != self._version:
                raise make_scope_error(parameter, "changed")
        written = self._shard_state is not None and self._shard_state.writes != self._writes
        if written or (self._cast_from is not None and get_version(self._cast_from[0]) != self._cast_from[1]):
            raise make_scope_error(self._weight.parameter, "changed")


@contextmanager
def cast_weights_once(model: nn.Module, *, holder: str = "") -> Iterator[None]:
    """Quantize every weight of the float8 linears and experts of `model` once in the block, for both its matmuls.

    The block contains the microbatches (forward and backward) of one optimizer step, eager or compiled, and ends before
    the optimizer steps. While it is open the codes take one byte per element and layout. Under FSDP2 with float8
    all-gather each rank quantizes its shard once, keeps the codes, and sends them in all all-gathers.

    The scope ignores weights of high-precision modules, weights that are all-gathered in high precision, and weights
    that only FSDP1 or only tensor parallelism shards. A torch checkpoint around eager modules may run its backward
    after the exit. It then multiplies by the codes of its forward.

    Args:
        model: a model with float8 modules, wrapped or not.
        holder: a name for the error of a second scope that is entered while this one is open.
    Raises:
        RuntimeError: the scope is already open for one of the modules; or a weight was changed, replaced or given
            another config inside it, which raises at the next eager use, at the next all-gather, or at the exit.
    """
    check_is_module(model, argument="model")
    weights = [weight for _, weight in iter_model_weights(model)]
    whole = [weight for weight in weights if _can_prepare(weight)]
    gathered = [(get_all_gather_state(weight.module), weight) for weight in weights if is_all_gather_weight(weight)]
    holders_now = {weight.prepared.holder for weight in whole if weight.prepared is not None}
    holders_now |= {prepared.holder for state, _ in gathered for prepared in state.prepared.values()}
    if holders_now:
        holders = ", ".join(sorted(filter(None, holders_now)))
        raise RuntimeError(
            f"cast_weights_once is already open for this model{holders and f', opened by {holders}'}; leave it before "
            "you enter it again"
        )
    try:
        for weight in whole:
            with torch.no_grad(), torch.inference_mode(False):  # a later forward may train
                weight.module.prepared_weights[weight.name] = PreparedWeight(weight, holder)
        for state, weight in gathered:
            state.prepared[weight.name] = CastOnceShard(weight, holder)
        yield
        for weight in whole:
            if weight.prepared is not None:
                weight.prepared.check(weight.parameter)
        for state, _ in gathered:
            for prepared in state.prepared.values():
                prepared.check()
    finally:
        for weight in whole:
            weight.module.prepared_weights.pop(weight.name, None)
            if weight.scaling is not None:
                weight.scaling.weight_observed = None
        for state, _ in gathered:
            state.prepared.clear()


def is_cast_once(weight: ModuleWeight) -> bool:
    """Return whether a `cast_weights_once` is open for this weight."""
    gathering = typing.cast(AllGatherState | None, weight.module.gathering)
    return weight.prepared is not None or (gathering is not None and weight.name in gathering.prepared)


def _can_prepare(weight: ModuleWeight) -> bool:
    is_plain = type(weight.parameter) in (nn.Parameter, FakeTensor)
    return is_plain and weight.module.gathering is None and weight.is_whole
