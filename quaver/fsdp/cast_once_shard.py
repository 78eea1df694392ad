"""`CastOnceShard`: a shard that is quantized once, while a `cast_weights_once` is open (weights/cast_once.py)."""

from __future__ import annotations

import typing
from collections.abc import Callable

from torch import Tensor

from quaver.experts.module_weight import ModuleWeight
from quaver.fsdp.scaled_shard import AllGatherInputs, ScaledShard, ScaledShardState
from quaver.linear.cast_once_weight import check_same_config, make_scope_error
from quaver.torch_private.versions import get_version


class CastOnceShard:
    """This rank's shard of a weight, quantized once while the scope is open, and a check that it does not change."""

    def __init__(self, weight: ModuleWeight, *, full_name: str, opened_by: str) -> None:
        """`full_name`, `opened_by`: see `open_scope`."""
        self._weight, self._config, self.opened_by, self._full_name = weight, weight.config, opened_by, full_name
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
        check_same_config(self._full_name, self._weight.config, self._config)
        if isinstance(weight, ScaledShard):  # else FSDP2 has unsharded it
            if self._shard_state is None:
                self._shard_state, self._version = weight.shard_state, get_version(parameter)
                self._writes = weight.shard_state.writes
            if weight.shard_state is not self._shard_state:
                raise make_scope_error(self._full_name, "replaced")
            if get_version(parameter) != self._version:
                raise make_scope_error(self._full_name, "changed")
        written = self._shard_state is not None and self._shard_state.writes != self._writes
        if written or (self._cast_from is not None and get_version(self._cast_from[0]) != self._cast_from[1]):
            raise make_scope_error(self._full_name, "changed")
