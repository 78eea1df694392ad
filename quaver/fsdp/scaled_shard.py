"""`ScaledShard`: a shard of a weight that stores the scales of the whole weight until it is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.linear.weight_form import WrapperWeight
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scaling import CastScales
from quaver.torch_private.versions import get_version


class AllGatherMetadata(NamedTuple):
    """Passed by `fsdp_pre_all_gather` to `fsdp_post_all_gather`; without scales for a payload in high precision."""

    scales: Sequence[CastScales]
    layouts: list[ScaleLayout]
    size: tuple[int, ...]
    dtype: torch.dtype


AllGatherInputs = tuple[tuple[Tensor, ...], AllGatherMetadata]
"""The result of `fsdp_pre_all_gather`: the payloads of this rank, and the metadata that reads the gathered ones."""


class AllGatherInputsCache(Protocol):
    """The inputs of a shard's all-gathers in an open `cast_weights_once`; weights/cast_once.py implements it."""

    opened_by: str

    def check(self) -> None:
        """Raise RuntimeError if the shard was replaced, written to or given another config since the entry."""

    def get_all_gather_inputs(self, quantize: Callable[[], AllGatherInputs]) -> AllGatherInputs:
        """Return the inputs of FSDP2's all-gather. The first call makes them by `quantize`."""


class ScaledShardState:
    """The scales of one shard, shared by all views of it."""

    __slots__ = ("are_precomputed", "computed_from", "name", "recorded_amax", "scales", "writes")

    def __init__(self, name: str) -> None:
        self.name = name
        """The name of the module's parameter."""
        self.scales: Sequence[CastScales] | None = None
        self.are_precomputed = False
        """Whether `precompute_scales` computed the last scales, which a write may have dropped since."""
        self.computed_from: tuple[Tensor, int, int] | None = None
        """The plain tensor that the scales were computed from, and its version and the parameter's at that time."""
        self.recorded_amax: Tensor | None = None
        """`LinearScaleSlots.recorded_weight_amax` of the all-gathers since the last write. It is replaced only after a
        write: forwards that read it may be queued on another stream, and all-gathers wait for that stream after an
        optimizer step.
        """
        self.writes = 0
        """The number of writes to the shard, whether there were scales to drop or not."""


class ScaledShard(WrapperWeight):
    """Base class of `Float8AllGatherWeight`: its wrapped shard and the scales of the whole weight."""

    shard_state: ScaledShardState

    def set_scales(self, scales: Sequence[CastScales], parameter: Tensor, *, are_precomputed: bool) -> None:
        """Store the scales of the whole weight `parameter` until the shard is written to."""
        self.shard_state.scales, self.shard_state.are_precomputed = scales, are_precomputed
        self.shard_state.computed_from = self.wrapped, get_version(self.wrapped), get_version(parameter)

    def get_scales(self, parameter: Tensor) -> Sequence[CastScales] | None:
        """Return the stored scales of the whole weight `parameter`, or None if there are none since the last write.

        Raises:
            RuntimeError: the wrapped tensor was written to directly; see [Note: when scales are dropped].
        """
        shard_state = self.shard_state
        if shard_state.scales is not None and shard_state.computed_from is not None:
            # A write to a DTensor that shares the shard moves the version of the parameter, not of the shard.
            tensor, version, parameter_version = shard_state.computed_from
            if tensor is not self.wrapped and parameter_version == get_version(parameter):
                # FSDP2 copied the shard into a padded tensor: the same values, so the scales hold for that tensor.
                shard_state.computed_from = self.wrapped, get_version(self.wrapped), parameter_version
            elif (version, parameter_version) != (get_version(tensor), get_version(parameter)):
                raise RuntimeError(
                    "the shard of a float8 weight was written to directly (through a state_dict?) after its scale was "
                    "computed. After such a write call model.load_state_dict, or "
                    "precompute_float8_dynamic_scale_for_fsdp(model), on every rank"
                )
        return shard_state.scales
