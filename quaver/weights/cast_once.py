"""`cast_weights_once`: quantize each float8 weight once for all microbatches of one optimizer step.

Outside the scope a float8 module quantizes the live weight at each use, because version counters do not see every way
to change a weight (`.data`, a kernel that writes in place, an optimizer that bypasses them). Inside, the caller
promises not to change the weights, and a change that torch can see is an error.

A whole weight is quantized at the entry. A shard that FSDP2 all-gathers in float8 is quantized for its first all-gather
in the scope, because its scale takes a collective; later all-gathers send the same codes. The mode of the model at that
moment does not matter: with a persistent scale, each forward that trains records what the cast observed
([Note: who records] in linear/scale_state.py).
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quaver.experts.module_weight import ModuleWeight, weights_under
from quaver.fsdp.gathered import AllGatherInputs, Float8AllGatherWeight, ScaleBox, is_all_gather_weight
from quaver.fsdp.siblings import AllGatherState, all_gather_state
from quaver.linear.module import Float8Linear
from quaver.torch_private.tracing import FakeTensor
from quaver.torch_private.versions import version_of


class PreparedWeight:
    """The operands of a weight while the scope is open, and a check that it does not change."""

    def __init__(self, weight: ModuleWeight, holder: str) -> None:
        self.operands, self.holder = weight.quantize(), holder
        self._of, self._config = weight, weight.config
        self._weight, self._memory = weight.parameter, weight.parameter.detach()
        self._version = version_of(self._weight)

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to since."""
        if weight is not self._weight:
            raise changed_inside_scope(weight, "replaced")
        if self._of.config is not self._config and self._of.config != self._config:
            raise changed_inside_scope(weight, "given another config")
        if version_of(weight) != self._version or _address(weight) != _address(self._memory):  # `.data = ...`
            raise changed_inside_scope(weight, "changed")


def _address(tensor: Tensor) -> int:
    """Where its memory begins; a fake tensor has none."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def changed_inside_scope(weight: Tensor, how: str) -> RuntimeError:
    """The error for a weight that was `how`: "changed", "replaced" or "given another config"."""
    return RuntimeError(
        f"a weight of shape {list(weight.shape)} was {how} inside cast_weights_once; "
        "leave the scope before you change weights"
    )


class PreparedShard:
    """This rank's shard of a weight, quantized once while `cast_weights_once` is open, and a check as above."""

    def __init__(self, weight: ModuleWeight, holder: str) -> None:
        self._weight, self.holder = weight, holder
        self._inputs: AllGatherInputs | None = None
        self._cast_from: tuple[Tensor, int] | None = None
        """The tensor that was quantized, and its version then."""
        self._box: ScaleBox | None = None
        self._writes = self._version = 0
        self.check()

    def all_gather_inputs(self, quantize: Callable[[], AllGatherInputs]) -> AllGatherInputs:
        """The inputs of FSDP2's all-gather: made by `quantize` in the first call, the same in all others."""
        self.check()
        if self._inputs is None:
            wrapped = typing.cast(Float8AllGatherWeight, self._weight.local).wrapped
            self._cast_from = wrapped, version_of(wrapped)
            self._inputs = quantize()
        return self._inputs

    def check(self) -> None:
        """Raise RuntimeError if the shard was replaced or written to since the entry.

        A write around the parameter, into a tensor of a state_dict, is found if it follows the cast; the cast reads one
        that precedes it.
        """
        weight, parameter = self._weight.local, self._weight.parameter
        if isinstance(weight, Float8AllGatherWeight):  # else FSDP2 holds it unsharded
            if self._box is None:
                self._box, self._writes, self._version = weight.box, weight.box.writes, version_of(parameter)
            if weight.box is not self._box:
                raise changed_inside_scope(parameter, "replaced")
            if version_of(parameter) != self._version:
                raise changed_inside_scope(parameter, "changed")
        written = self._box is not None and self._box.writes != self._writes
        if written or (self._cast_from is not None and version_of(self._cast_from[0]) != self._cast_from[1]):
            raise changed_inside_scope(self._weight.parameter, "changed")


@contextmanager
def cast_weights_once(model: nn.Module, *, holder: str = "") -> Iterator[None]:
    """Quantize every weight of the float8 linears and experts of `model` once, for both its matmuls, until the exit.

    Put it around the microbatches (forward and backward) of one optimizer step, eager or compiled, and leave it before
    the optimizer steps. The codes take one byte per element and layout while the scope is open. Under FSDP2 with float8
    all-gather each rank quantizes its shard once, and all all-gathers in the scope send those codes; the codes of the
    shard stay for as long. A model without float8 modules is left alone, and so is a weight that is all-gathered in
    high precision, or sharded by FSDP1 or by tensor parallelism alone. A checkpoint of torch around eager modules may
    go backward after the exit, and multiplies by the codes of its forward.

    Args:
        model: a model with float8 modules, wrapped or not.
        holder: who opens the scope, for the error of whoever finds it open.
    Raises:
        RuntimeError: the scope is already open for one of the modules, or a weight was changed or replaced inside it
            (found at the next eager use of the module or the next all-gather, and at the exit).
    """
    weights = [weight for _, weight in weights_under(model)]
    whole = [weight for weight in weights if _is_whole(weight)]
    gathered = [(all_gather_state(weight.module), weight) for weight in weights if is_all_gather_weight(weight)]
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
                weight.prepare(PreparedWeight(weight, holder))
        for state, weight in gathered:
            state.prepared[weight.name] = PreparedShard(weight, holder)
        yield
        for weight in whole:
            if weight.prepared is not None:
                weight.prepared.check(weight.parameter)
        for state, _ in gathered:
            for prepared in state.prepared.values():
                prepared.check()
    finally:
        for weight in whole:
            weight.prepare(None)
            if isinstance(weight.module, Float8Linear) and weight.module.scaling is not None:
                weight.module.scaling.weight_observed = None
        for state, _ in gathered:
            state.prepared.clear()


def is_cast_once(weight: ModuleWeight) -> bool:
    """Whether a `cast_weights_once` is open for this weight."""
    gathering = typing.cast(AllGatherState | None, weight.module.gathering)
    return weight.prepared is not None or (gathering is not None and weight.name in gathering.prepared)


def _is_whole(weight: ModuleWeight) -> bool:
    parameter, module = weight.parameter, weight.module
    if type(parameter) not in (nn.Parameter, FakeTensor) or module.gathering is not None:
        return False
    if isinstance(module, Float8Linear):
        return parameter.shape == (module.out_features, module.in_features)
    return parameter.dim() == 3
