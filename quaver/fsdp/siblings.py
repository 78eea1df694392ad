"""Which weights of a model share the collective that computes their scales, and when it runs.

Every rank must come to the collective with the same weights: before the first one the ranks compare what they have
(runtime/agreement.py), and a weight whose scales are unknown brings all of its siblings that have none.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, weights_of_module, weights_under
from quaver.fsdp.scales import WholeScales, compute_whole_scales, rounding_rule
from quaver.fsdp.shard import Ranks, Shard, shard_of
from quaver.linear.module import Float8Linear
from quaver.linear.weight_form import WrappedTensor
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.agreement import check_ranks_agree
from quaver.runtime.slow_paths import say_once
from quaver.torch_private.dtensor import is_dtensor, local_tensor


class AllGatherWeight(Protocol):
    """A weight, or this rank's shard of it, that FSDP2 all-gathers in float8 (`Float8AllGatherWeight`)."""

    wrapped: Tensor

    def scales(self, parameter: Tensor) -> WholeScales | None:
        """The scales of the whole weight, which is `parameter`; None if they are unknown."""

    def remember(self, scales: WholeScales, parameter: Tensor) -> None:
        """Keep the scales of the whole weight until it is written to."""


class PreparedInputs(Protocol):
    """The inputs of a shard's all-gathers while a `cast_weights_once` is open: quantized once, then sent again."""

    holder: str
    """Who opened the scope; "" for a `with` statement of the user."""

    def all_gather_inputs(self, quantize: Callable[[], Any]) -> Any:
        """Made by `quantize` in the first call, the same in all others."""

    def check(self) -> None:
        """Raise RuntimeError if the shard was changed since."""


NamedWeights = Sequence[tuple[str, ModuleWeight]]


class Siblings:
    """The weights of one model whose scales are computed together; each of their modules holds this object."""

    def __init__(self, named: NamedWeights) -> None:
        self.named = named
        self.checked: set[Ranks] = set()
        """The ranks of the process groups that agree about them."""


@dataclass
class AllGatherState:
    """`gathering` of a module. It is not copied with it, because a copy has other siblings."""

    siblings: Siblings
    hooks: tuple[RemovableHandle, ...] = ()
    shards: dict[str, tuple[Tensor, Shard]] = field(default_factory=dict)
    """By name, a sharded weight and its `Shard` without `local`: asking DTensor for every all-gather is slow."""
    prepared: dict[str, PreparedInputs] = field(default_factory=dict)
    """By name; filled while a `cast_weights_once` is open."""


def local_weight(linear: Float8Linear) -> Tensor:
    """The weight of `linear`, or this rank's shard of it."""
    return local_tensor(linear.weight)


def _all_gather_weight(weight: ModuleWeight) -> AllGatherWeight:
    if not isinstance(weight.local, WrappedTensor):
        raise RuntimeError(
            f"a weight {list(weight.parameter.shape)} that FSDP2 all-gathers in float8 was replaced after fully_shard, "
            "which keeps the one that it had; write values with copy_ or load_state_dict"
        )
    return typing.cast(AllGatherWeight, weight.local)


def all_gather_state(module: Float8Linear | Float8Experts) -> AllGatherState:
    """`module.gathering` of a module whose weights are all-gathered in float8."""
    if module.gathering is None:  # a copy
        module.gathering = AllGatherState(Siblings([("", weight) for weight in weights_of_module(module)]))
    return typing.cast(AllGatherState, module.gathering)


def current_shard(weight: ModuleWeight) -> Shard:
    """This rank's shard of `weight`."""
    shards, parameter, local = all_gather_state(weight.module).shards, weight.parameter, _all_gather_weight(weight)
    if weight.name not in shards or shards[weight.name][0] is not parameter:
        shards[weight.name] = parameter, shard_of(parameter, local.wrapped.new_empty(0))  # keep no memory alive
    return shards[weight.name][1]._replace(local=local.wrapped)


def persistent_scale(weight: ModuleWeight) -> PersistentScale | None:
    """The weight's, to look at: it records nothing. Experts have none."""
    if isinstance(weight.module, Float8Experts):
        return None
    mesh = typing.cast(Any, weight.parameter).device_mesh
    device = torch.device(mesh.device_type)  # an offloaded shard lies elsewhere
    return weight.module.persistent_scales(device, recording=False).weight


def _is_sharded(weight: ModuleWeight) -> bool:
    """Whether FSDP2 holds `weight` sharded, to be all-gathered in float8."""
    parameter = weight.parameter
    if not weight.config.casts.weight.is_float8:  # gathered in high precision for now
        return False
    if not is_dtensor(parameter) or not isinstance(local_tensor(parameter), WrappedTensor):
        return False
    sharding = weight.module.sharding if isinstance(weight.module, Float8Linear) else None
    return sharding is None or parameter.device_mesh.ndim > sharding.mesh.ndim


def _needs_scales(weight: ModuleWeight) -> bool:
    """Whether the weight is all-gathered in float8 with a scale that is not persistent, or not initialized yet."""
    if not _is_sharded(weight):
        return False
    scale = persistent_scale(weight)
    return scale is None or not scale.is_initialized


def whole_scales(weight: ModuleWeight) -> WholeScales:
    """The dynamic scales of `weight`.

    If they are unknown, they are computed in one collective with those of every sibling that has none.
    """
    known = _all_gather_weight(weight).scales(weight.parameter)
    if known is not None:
        return known
    siblings = all_gather_state(weight.module).siblings
    unknown = [
        (name, sibling)
        for name, sibling in siblings.named
        if _needs_scales(sibling) and _all_gather_weight(sibling).scales(sibling.parameter) is None
    ]
    own = current_shard(weight)
    stale = _by_collective(unknown)[_collective_key(weight, own)]
    if own.ranks[0] not in siblings.checked:
        named = [(name, sibling) for name, sibling, _ in stale]
        check_ranks_agree(_describe(named), own.fsdp_group, own.device, what=_WHAT)
        siblings.checked.add(own.ranks[0])
    _compute_and_remember(stale)
    return typing.cast(WholeScales, _all_gather_weight(weight).scales(weight.parameter))


def _collective_key(weight: ModuleWeight, shard: Shard) -> tuple[Any, ...]:
    """Weights whose scales are computed in one collective have this in common; see [Note: equal groups] in shard.py."""
    return *shard.ranks, *rounding_rule(weight.config)


NamedShards = list[tuple[str, ModuleWeight, Shard]]


def _by_collective(named: NamedWeights) -> dict[tuple[Any, ...], NamedShards]:
    """The weights with their shards, by the collective that computes their scales."""
    together: dict[tuple[Any, ...], NamedShards] = {}
    for name, weight in named:
        shard = current_shard(weight)
        together.setdefault(_collective_key(weight, shard), []).append((name, weight, shard))
    return together


def _compute_and_remember(named: NamedShards) -> None:
    weights, shards = [weight for _, weight, _ in named], [shard for _, _, shard in named]
    with torch.no_grad():
        scales = compute_whole_scales(shards, weights)
    for weight, whole in zip(weights, scales, strict=True):
        _all_gather_weight(weight).remember(whole, weight.parameter)


_WHAT = "the weights to all-gather in float8"


def _describe(named: NamedWeights) -> list[str]:
    return [f"{name} {list(weight.parameter.shape)}: {weight.config}" for name, weight in named]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the dynamic scales of every weight under `module` that FSDP2 all-gathers in float8, in one all-reduce.

    Call it after `optimizer.step()`, on every rank. Without it the first all-gather of the next step does the same work
    at a moment when the all-gather has to wait for it. Scales stay in use until their weight is written to, by an
    optimizer, by `load_state_dict` or by any operation on the parameter. Weights with a delayed or static scale that is
    initialized are left alone. A module whose float8 weights are all gathered in high precision is, too: that is said
    once, for `enable_fsdp_float8_all_gather` was forgotten.

    One collective whatever the number of weights, if their configs round scales alike: over the ranks that share the
    weights' shards, and over those of tensor parallelism at the same time if both together are all ranks; otherwise one
    more for tensor parallelism. The first call for a module also checks, in a collective of 16 bytes, that the ranks
    agree about the weights.

    Raises:
        RuntimeError: on every rank, if ranks have different weights to all-gather or different configs for them.
    """
    configs = [weight.config for _, weight in weights_under(module)]
    if configs and not any(config.enable_fsdp_float8_all_gather for config in configs):
        say_once(
            "scales of no all-gather",
            "precompute_float8_dynamic_scale_for_fsdp has nothing to compute: no config of this model has "
            "enable_fsdp_float8_all_gather, so FSDP2 gathers its weights in high precision",
        )
    precompute_scales(module)


def precompute_scales(module: nn.Module) -> None:
    """`precompute_float8_dynamic_scale_for_fsdp` for who calls it whatever the configs are."""
    named = [(name, weight) for name, weight in weights_under(module) if _is_sharded(weight)]
    _check_once(module, named)
    for together in _by_collective([(name, weight) for name, weight in named if _needs_scales(weight)]).values():
        _compute_and_remember(together)


def _check_once(module: nn.Module, named: NamedWeights) -> None:
    """Check that the ranks agree, in a group that a rank without such weights has too."""
    checked = [(id(weight.module), weight.name) for _, weight in named]
    if getattr(module, "_float8_all_gather_checked", None) == checked:
        return
    sharded = next((p for p in module.parameters() if is_dtensor(p)), None)
    if sharded is None:
        return
    axis = next((i for i, placement in enumerate(sharded.placements) if hasattr(placement, "dim")), 0)
    mesh = sharded.device_mesh
    check_ranks_agree(_describe(named), mesh.get_group(axis), torch.device(mesh.device_type), what=_WHAT)
    module._float8_all_gather_checked = checked  # type: ignore[assignment]
