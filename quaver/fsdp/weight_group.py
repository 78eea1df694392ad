"""Computes the dynamic scales of all weights of a model in one collective: a `WeightGroup`.

Every rank must enter the collective with the same weights. So the ranks compare their weights, configs and loaded
scales before the first collective and after a change (runtime/agreement.py). `precompute_float8_dynamic_scale_for_fsdp`
runs the collective after an optimizer step. An all-gather that finds no scales computes the scales of every
weight of the group that lacks them.
"""

from __future__ import annotations

import logging
import typing
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, iter_model_weights, iter_module_weights
from quaver.fsdp.scaled_shard import AllGatherInputsCache, ScaledShard
from quaver.fsdp.scales import compute_whole_scales, get_scale_arguments
from quaver.fsdp.shard import LocatedShard, find_mesh_device, list_shard_axes, locate_shard
from quaver.linear.module import Float8Linear
from quaver.recipes.scaling import CastScales
from quaver.runtime.agreement import check_ranks_agree_after_change, check_ranks_agree_once
from quaver.runtime.errors import check_is_module
from quaver.runtime.log_once import log_once
from quaver.runtime.module_names import format_module_name
from quaver.torch_private.dtensor import get_local_tensor, is_dtensor

logger = logging.getLogger(__name__)


NamedWeights = Sequence[tuple[str, ModuleWeight]]
CollectiveKey = tuple[Any, ...]
"""The result of `_make_collective_key`."""
_GATHERED_WEIGHTS = "the weights to all-gather in float8"
_WRITTEN_WEIGHTS = "the weights to all-gather in float8 that were written to"
_WRITE = "a weight to all-gather in float8 was written to outside of the usual step"


class WeightGroup:
    """The weights of one model whose scales are computed together. Their modules share this object."""

    def __init__(self, named_weights: NamedWeights) -> None:
        self.named_weights = named_weights
        self.usual_writes: dict[CollectiveKey, set[tuple[str, ...]]] = {}
        """Names of weights that lacked scales together at an all-gather, as after each step of an optimizer."""


@dataclass(eq=False)
class AllGatherState:
    """The attribute `all_gather_state` of a module. It is not copied with the module, because a copy has no group."""

    weight_group: WeightGroup
    hooks: tuple[RemovableHandle, ...] = ()
    shards: dict[str, tuple[Tensor, LocatedShard]] = field(default_factory=dict)
    """Caches by name a weight and its `LocatedShard` with an empty `local`, because DTensor's queries are slow."""
    cast_once_shards: dict[str, AllGatherInputsCache] = field(default_factory=dict)
    """Shards by name, filled while a `cast_weights_once` is open."""


def _get_scaled_shard(weight: ModuleWeight) -> ScaledShard:
    local = weight.local_tensor
    if not isinstance(local, ScaledShard):
        named_weights = get_all_gather_state(weight.module).weight_group.named_weights
        name = next((name for name, member in named_weights if member == weight), "")
        raise RuntimeError(
            f"the weight of {format_module_name(name)}, which FSDP2 all-gathers in float8, was replaced after "
            "fully_shard, but FSDP2 still holds the original; write values with copy_ or load_state_dict"
        )
    return local


def get_all_gather_state(module: Float8Linear | Float8Experts) -> AllGatherState:
    """Return `module.all_gather_state`, which is created for a copy of a module."""
    state = module.all_gather_state
    if not isinstance(state, AllGatherState):
        state = AllGatherState(WeightGroup([("", weight) for weight in iter_module_weights(module)]))
        module.all_gather_state = state
    return state


def get_current_shard(weight: ModuleWeight) -> LocatedShard:
    """Return this rank's `LocatedShard` of `weight`.

    All but `local` is cached until the module has another parameter.
    """
    shards, parameter = get_all_gather_state(weight.module).shards, weight.parameter
    local = _get_scaled_shard(weight)
    if weight.name not in shards or shards[weight.name][0] is not parameter:
        shards[weight.name] = parameter, locate_shard(parameter, local.wrapped.new_empty(0))  # keep no memory alive
    return shards[weight.name][1]._replace(local=local.wrapped)


def _is_sent_in_float8(weight: ModuleWeight) -> bool:
    """Return whether FSDP2 holds `weight` sharded and `high_precision_matmuls` does not cover it at this step."""
    return weight.config.casts.weight.is_float8 and _is_sharded(weight)


def _is_sharded(weight: ModuleWeight) -> bool:
    """Return whether FSDP2 holds `weight` sharded, to all-gather in float8."""
    parameter = weight.parameter
    if not is_dtensor(parameter) or not isinstance(get_local_tensor(parameter), ScaledShard):
        return False
    sharding = weight.module.sharding if isinstance(weight.module, Float8Linear) else None
    return sharding is None or parameter.device_mesh.ndim > sharding.mesh.ndim


def _needs_scales(weight: ModuleWeight) -> bool:
    """Return whether the next float8 all-gather of `weight` computes scales: no persistent scale is known.

    Moves the scale slots to the device of the mesh, where the all-gather casts.
    """
    if not _is_sent_in_float8(weight):
        return False
    if weight.scale_slots is None:
        return True
    device = find_mesh_device(typing.cast(Any, weight.parameter).device_mesh)  # an offloaded shard is elsewhere
    scale = weight.scale_slots.move_and_get_scales(device).weight
    return scale is None or not scale.is_known


def check_ranks_agree_on_gather(weight: ModuleWeight) -> None:
    """Check, at the first all-gather of `weight` and after a change, that the ranks gather its weight group alike.

    A change is another config or a load of persistent scales. Both decide what a rank sends, and whether it first
    computes scales with the other ranks.

    Raises:
        RuntimeError: on every rank, if the weight groups differ between ranks; on this rank, if only this one changed.
    """
    state = get_all_gather_state(weight.module)

    def list_named() -> NamedWeights:
        ranks = get_current_shard(weight).group_ranks
        sharded = [(name, member) for name, member in state.weight_group.named_weights if _is_sharded(member)]
        return [(name, member) for name, member in sharded if get_current_shard(member).group_ranks == ranks]

    check_ranks_agree_once(
        state,
        _make_fingerprint(weight),
        lambda: _describe_weights(list_named()),
        lambda: _list_process_groups(weight),
        subject=_GATHERED_WEIGHTS,
        find_others=lambda: {
            get_all_gather_state(member.module): _make_fingerprint(member) for _, member in list_named()
        },
    )


def _list_process_groups(weight: ModuleWeight) -> list[ProcessGroup]:
    """Return the process groups that share the weight's all-gather. A replica may run forwards that others skip."""
    shard = get_current_shard(weight)
    return [shard.fsdp_group] if shard.tp_group is None else [shard.fsdp_group, shard.tp_group]


def _make_fingerprint(weight: ModuleWeight) -> list[Any]:
    """Return the state of the weight's module that decides how its weights are gathered."""
    slots = weight.scale_slots
    return [weight.config, 0 if slots is None else slots.conversion_slots.loads]


def get_or_compute_whole_scales(weight: ModuleWeight) -> Sequence[CastScales]:
    """Return the dynamic scales of `weight`, as `compute_whole_scales` does.

    If they are unknown, one collective computes the scales of all weights of `weight_group` that lack them. A rank that
    wrote alone would enter it alone. So the ranks first wait for each other in the store, and compare the weights that
    lack scales, if a write dropped precomputed ones, or if other weights lack them than in earlier steps. The writes of
    each step's optimizer are always the same, and wait for no rank.

    Raises:
        RuntimeError: this rank wrote alone, to other weights than each step writes to; or, on every rank, ranks wrote
            to different ones.
    """
    scales = _get_scaled_shard(weight).get_scales(weight.parameter)
    if scales is not None:
        return scales
    weight_group = get_all_gather_state(weight.module).weight_group
    unknown = [
        (name, member)
        for name, member in weight_group.named_weights
        if _needs_scales(member) and _get_scaled_shard(member).get_scales(member.parameter) is None
    ]
    key = _make_collective_key(weight)
    named = _group_by_collective(unknown)[key]
    names = tuple(name for name, _ in named)
    are_precomputed = any(_get_scaled_shard(member).shard_state.are_precomputed for _, member in named)
    usual = weight_group.usual_writes.setdefault(key, set())
    if are_precomputed or (usual and names not in usual):
        process_groups = _list_process_groups(weight)
        check_ranks_agree_after_change(names, *process_groups, subject=_WRITTEN_WEIGHTS, event=_WRITE)
    usual.add(names)
    _compute_and_set_scales(named, are_precomputed=False)
    return typing.cast(Sequence[CastScales], _get_scaled_shard(weight).get_scales(weight.parameter))


def _make_collective_key(weight: ModuleWeight) -> CollectiveKey:
    """Make a key, equal for weights that share the collective of scales; see [Note: equal groups] in shard.py."""
    return *get_current_shard(weight).group_ranks, *get_scale_arguments(weight.config)


def _group_by_collective(named: NamedWeights) -> Mapping[CollectiveKey, NamedWeights]:
    by_collective: defaultdict[CollectiveKey, list[tuple[str, ModuleWeight]]] = defaultdict(list)
    for name, weight in named:
        by_collective[_make_collective_key(weight)].append((name, weight))
    return by_collective


def _compute_and_set_scales(named: NamedWeights, *, are_precomputed: bool) -> None:
    weights = [weight for _, weight in named]
    with torch.no_grad():
        scales = compute_whole_scales([get_current_shard(weight) for weight in weights], weights)
    for weight, weight_scales in zip(weights, scales, strict=True):
        _get_scaled_shard(weight).set_scales(weight_scales, weight.parameter, are_precomputed=are_precomputed)


def _describe_weights(named: NamedWeights) -> list[str]:
    """Return a line for each field of each weight's config; an error quotes the first line that differs."""
    lines = []
    for name, weight in named:
        loaded = "" if weight.scale_slots is None else f", {weight.scale_slots.describe_loaded_weight_scale()}"
        lines.append(f"{name} {list(weight.parameter.shape)}{loaded}")
        lines += [f"{name} {field}" for field in str(weight.config).split("; ")]
    return lines


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the dynamic scales of every weight under `module` that FSDP2 all-gathers in float8, in one all-reduce.

    Call it on every rank after `optimizer.step()`. It is optional: otherwise the first all-gather of the next step
    computes the scales and has to wait for them. A scale is valid until its weight is written to by an optimizer, by
    `load_state_dict` or by any other op on the parameter. Weights with a known delayed or static scale are
    skipped. If no config under `module` sets `enable_fsdp_float8_all_gather`, the log says so once for each `module`.

    The number of collectives does not depend on the number of weights. There is one all-reduce over the ranks that
    shard the weights, for all configs with the same float8 dtype and rounding of scales. With tensor parallelism, it
    also spans the tensor-parallel ranks if both groups together are all ranks; otherwise there is a second all-reduce.
    The first call for a module also checks that the ranks agree about the weights, in a collective of 16 bytes over the
    ranks of each axis of the mesh.

    Raises:
        RuntimeError: on every rank, if ranks have different weights to all-gather or different configs for them.
    """
    check_is_module(module, argument="module")
    configs = [weight.config for _, weight in iter_model_weights(module)]
    if configs and not any(config.enable_fsdp_float8_all_gather for config in configs):
        log_once(
            logger,
            module,
            "no all-gather",
            "precompute_float8_dynamic_scale_for_fsdp has nothing to compute: no config of this model has "
            "enable_fsdp_float8_all_gather, so FSDP2 gathers its weights in high precision",
        )
    precompute_scales(module)


def precompute_scales(module: nn.Module) -> None:
    """Run `precompute_float8_dynamic_scale_for_fsdp` without its message."""
    named = [(name, weight) for name, weight in iter_model_weights(module) if _is_sent_in_float8(weight)]
    _check_ranks_agree_on_weights(module, named)
    needed = [(name, weight) for name, weight in named if _needs_scales(weight)]
    for weights_of_collective in _group_by_collective(needed).values():
        _compute_and_set_scales(weights_of_collective, are_precomputed=True)


def _check_ranks_agree_on_weights(module: nn.Module, named: NamedWeights) -> None:
    """Check that the ranks agree. A rank without such weights takes part, so any DTensor tells the process groups."""
    fingerprint = [(weakref.ref(weight.module), weight.name, *_make_fingerprint(weight)) for _, weight in named]
    check_ranks_agree_once(
        module,
        fingerprint,
        lambda: _describe_weights(named),
        lambda: _find_process_groups(module),
        subject=_GATHERED_WEIGHTS,
    )


def _find_process_groups(module: nn.Module) -> list[ProcessGroup]:
    """Return the process groups of a sharded parameter's mesh axes, a matrix on most axes if possible; else none."""
    sharded = [parameter for parameter in module.parameters() if is_dtensor(parameter) and list_shard_axes(parameter)]
    if not sharded:
        return []
    mesh = max(sharded, key=lambda parameter: (parameter.dim() == 2, parameter.device_mesh.ndim)).device_mesh
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]
