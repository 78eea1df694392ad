"""Scales of sharded weights, equal to those that one rank with the whole weight would compute.

A scale belongs to the whole tensor. Each rank takes the amaxes of its shards, one all-reduce takes their maximum over
the ranks, and the scales of all weights are computed from that vector at once: one collective and, for tensorwise
scales, a fixed number of kernels, whatever the number of weights.

[Note: cut blocks] A shard begins at any row, inside a block or not. Its amaxes are those of the parts of blocks that it
holds; the maximum over the ranks makes them whole. A rank then quantizes its shard with each row's blocks of scales.

[Note: equal groups] Weights on equal meshes may hold several process groups of the same ranks. PyTorch caches what it
infers about DTensors by their meshes, and meshes of the same ranks are equal, so that a weight can come with the groups
of an equal mesh that was made before. Hence groups are told apart by their ranks.

[Note: shapes] FSDP2 shards a weight [N, K] along dim 0 (or 1). Tensor parallelism may have sharded it before; N and K
are then those of the tensor-parallel part, which is what FSDP2 all-gathers. A scale that reduces a dim which tensor
parallelism sharded takes a second maximum, over that mesh axis. If all do, both are one maximum over all ranks.

[Note: experts] A weight [E, R, C] is E matrices, each with scales of its own (experts/groups.py). FSDP2 shards whole
experts (dim 0) or the rows of each (dim 1). In both cases each row of a shard has a place among the scales, and a rank
takes the amaxes at the places of its rows. Expert parallelism may have split the experts before; E is then the number
of those here, and no scale is shared with its other ranks.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from quaver.experts.cast import amax_of_places
from quaver.experts.grouped_mm import blocks_of_stored
from quaver.experts.groups import Block, count_of_scales, places_of_rows, shape_of_scales
from quaver.experts.module import Float8Experts, is_transposed
from quaver.experts.module_weight import ModuleWeight, weights_of_module, weights_under
from quaver.linear.module import Float8Linear
from quaver.linear.weight_form import WrappedTensor
from quaver.recipes import scaling
from quaver.recipes.cast_config import ALL
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.scaling import PersistentScale, Scales, scales_of, scales_of_blocks
from quaver.runtime.agreement import check_ranks_agree
from quaver.runtime.collectives import max_over_ranks
from quaver.torch_private.dtensor import is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard as PlacementShard

Grouping = int | None | tuple[int, int]
"""Which elements of a weight share a scale: those along a dim, all of them (None), or those of a block of this size.

Of experts always a `Block` of experts/groups.py."""

WholeScales = Sequence[Scales]
"""The scales of one weight [N, K], one for each cast, in the order of `groupings`: (), [1, K], [N, 1] or blocks'.
Of experts those of experts/groups.py."""


def _scale_shape(grouping: Grouping, size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of `size`."""
    if isinstance(grouping, tuple):
        if len(size) == 3:
            return shape_of_scales(grouping, size[0], size[0] * size[1], size[2])
        return scaling.block_counts(size[0], size[1], grouping)
    return {None: (), 0: (1, size[1]), 1: (size[0], 1)}[grouping]


class AllGatherWeight(Protocol):
    """A weight, or this rank's shard of it, that FSDP2 all-gathers in float8 (`Float8AllGatherWeight`)."""

    wrapped: Tensor

    def scales(self, parameter: Tensor) -> WholeScales | None:
        """The scales of the whole weight, which is `parameter`; None if they are unknown."""

    def remember(self, scales: WholeScales, parameter: Tensor) -> None:
        """Keep the scales of the whole weight until it is written to."""


class PreparedInputs(Protocol):
    """What a rank all-gathers while a `cast_weights_once` is open."""

    holder: str
    """Who opened the scope; "" for a `with` statement of the user."""

    def all_gather_inputs(self, quantize: Callable[[], Any]) -> Any:
        """Made by `quantize` in the first call, the same in all others."""

    def check(self) -> None:
        """Raise RuntimeError if the shard was changed since."""


Ranks = tuple[int, ...]
"""The global ranks of a process group, in its order; () for none."""


class Shard(NamedTuple):
    """One rank's shard, and where it lies in the weight that FSDP2 all-gathers."""

    local: Tensor
    """[n, k], plain; n may be 0. Of experts [e, r, C]."""
    size: tuple[int, ...]
    """[N, K]; see [Note: shapes]. Of experts [E, R, C]."""
    dim: int
    """The dim that FSDP2 shards."""
    offset: int
    """Where the shard begins along it."""
    fsdp_group: ProcessGroup
    tp_group: ProcessGroup | None
    tp_dim: int | None
    """The dim that tensor parallelism sharded before."""
    device: torch.device
    """The device of the groups' collectives; an offloaded shard lies elsewhere."""
    ranks: tuple[Ranks, Ranks]
    """Those of the two groups."""

    def part(self, of_whole: Tensor) -> Tensor:
        """This shard's part of scales [N, 1] or [1, K] of the whole weight, or the one scale ()."""
        if of_whole.dim() == 0 or of_whole.shape[self.dim] == 1 != self.size[self.dim]:
            return of_whole
        return of_whole.narrow(self.dim, self.offset, self.local.shape[self.dim])

    def part_of_blocks(self, of_whole: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """This shard's part of the scales of blocks, and the size of its blocks: 1 along the dim that may be cut."""
        length, n = block_size[self.dim], self.local.shape[self.dim]
        first, last = self.offset // length, -(-(self.offset + n) // length)
        scale = of_whole.narrow(self.dim, first, last - first) if n else of_whole.narrow(self.dim, 0, 0)
        scale = scale.repeat_interleave(length, self.dim).narrow(self.dim, self.offset - first * length if n else 0, n)
        return scale, (1, block_size[1]) if self.dim == 0 else (block_size[0], 1)

    def places(self, block: Block) -> Tensor:
        """Of experts: for each row of the shard the row of its scale among those of the whole weight, int64."""
        experts, rows, _ = self.size
        places = places_of_rows(None, experts, experts * rows, block[0], self.local.device).view(experts, rows)
        return places.narrow(self.dim, self.offset, self.local.shape[self.dim]).flatten()


def shard_of(weight: Tensor, local: Tensor) -> Shard:
    """Where the shard `local` of a weight lies while FSDP2 holds the weight sharded.

    FSDP2 shards over one mesh axis; tensor parallelism, if any, over the axis after it.
    """
    if not is_dtensor(weight):
        raise RuntimeError(f"expected a sharded weight, got {type(weight).__name__}; reshard the model first")
    mesh, placements = weight.device_mesh, weight.placements
    axes = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]  # Shard or _StridedShard
    if len(axes) not in (1, 2):
        raise NotImplementedError(
            f"expected a weight that FSDP2 shards over one mesh axis, and tensor parallelism over at most one more; "
            f"got {placements} on {mesh}"
        )
    dims = [typing.cast("PlacementShard", placements[axis]).dim for axis in axes]
    size = list(weight.shape)
    are_experts = len(size) == 3
    if are_experts and (dims[0] == 2 or dims[1:] not in ([], [0])):
        raise NotImplementedError(
            "expected weights of experts that FSDP2 shards along dim 0 or 1, and expert parallelism alone before; got "
            f"{placements} on {mesh}; turn enable_fsdp_float8_all_gather off"
        )
    tp_group = tp_dim = None
    if len(axes) == 2:
        offset, chunk = _chunk(size[dims[1]], mesh, axes[1])
        size[dims[1]] = min(chunk, size[dims[1]] - offset)
    if len(axes) == 2 and not are_experts:
        tp_group, tp_dim = mesh.get_group(axes[1]), dims[1]
    offset, _ = _chunk(size[dims[0]], mesh, axes[0])
    device = torch.device(mesh.device_type)
    fsdp_group = mesh.get_group(axes[0])
    ranks = _ranks(fsdp_group), _ranks(tp_group)
    return Shard(local, tuple(size), dims[0], offset, fsdp_group, tp_group, tp_dim, device, ranks)


def _ranks(group: ProcessGroup | None) -> Ranks:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _chunk(length: int, mesh: DeviceMesh, axis: int) -> tuple[int, int]:
    """Where this rank's chunk of `length` begins, and how long chunks are; as torch.chunk, the last may be short."""
    chunk = -(-length // mesh.size(axis))
    return min(mesh.get_local_rank(axis) * chunk, length), chunk


# ---- the scales of many weights --------------------------------------------------------------------------------------


def groupings(weight: ModuleWeight) -> list[Grouping]:
    """How a weight is scaled, one for each cast that differs."""
    row: Grouping
    column: Grouping
    if isinstance(weight.module, Float8Experts):
        row, column = blocks_of_stored(weight.config, is_transposed(weight.module))
    else:
        row, column = (_grouping(cast, dim) for cast, dim in zip(weight.config.casts.weight[:2], (1, 0), strict=True))
    return [row] if row == column else [row, column]


def _grouping(cast: CastConfig, dim: int) -> Grouping:
    """`dim`: the one that the matmul contracts."""
    sharing = cast.known_sharing("float8 all-gather")
    if ALL not in sharing:
        return sharing if dim == 1 else sharing[::-1]
    return None if sharing == (ALL, ALL) else dim


def compute_whole_scales(shards: Sequence[Shard], weights: Sequence[ModuleWeight]) -> list[WholeScales]:
    """The scales of every weight; a collective over the ranks that hold the shards, all of which must call it.

    Args:
        shards: shards of weights over the same groups, in the same order on every rank.
        weights: what they are shards of, in the same order, of one float8 dtype and one way to round scales.
    """

    def is_over_tp(key: tuple[int, Grouping]) -> bool:
        """Whether tensor parallelism sharded the dim that the scales of a cast reduce."""
        tp_dim = shards[key[0]].tp_dim
        return tp_dim is not None and key[1] in (None, tp_dim)

    # The key of a cast: the index of its weight, and the dim that its scales reduce. Those over TP stand last.
    casts = sorted(((i, each) for i, weight in enumerate(weights) for each in groupings(weight)), key=is_over_tp)
    shapes = [_scale_shape(each, shards[i].size) for i, each in casts]
    lengths = [math.prod(shape) for shape in shapes]
    only_fsdp = sum(length for key, length in zip(casts, lengths, strict=True) if not is_over_tp(key))
    amaxes = _max_over_groups(_local_amaxes(shards, casts).to(shards[0].device), only_fsdp, shards[0])
    float8_dtype, power_of_2, *of_blocks = _rule(weights[0].config)
    compute = scales_of_blocks if of_blocks else scales_of
    quant, dequant = compute(amaxes, float8_dtype, power_of_2, *of_blocks)
    made: dict[tuple[int, Grouping], Scales] = {}
    for key, shape, *of_cast in zip(casts, shapes, quant.split(lengths), dequant.split(lengths), strict=True):
        made[key] = Scales(*(vector.view(shape) for vector in of_cast))
    return [[made[i, each] for each in groupings(weight)] for i, weight in enumerate(weights)]


def _rule(config: Float8LinearConfig) -> tuple[Any, ...]:
    """What weights must have in common for their scales to be computed at once; of blocks also their mode."""
    weight = config.casts.weight
    of_blocks = (weight.row.e8m0_mode,) if weight.row.is_blockwise else ()
    return weight.row.float8_dtype, weight.power_of_2, *of_blocks


def _local_amaxes(shards: Sequence[Shard], casts: Sequence[tuple[int, Grouping]]) -> Tensor:
    """This rank's amaxes for `casts`, one after another, float32; 0 where another rank's shard is."""
    tensorwise = [i for i, each in casts if each is None and shards[i].local.numel()]
    # One multi-tensor kernel for all tensorwise scales.
    norms = torch._foreach_norm([shards[i].local for i in tensorwise], torch.inf) if tensorwise else []
    norm_of = {i: norm.view(1) for i, norm in zip(tensorwise, norms, strict=True)}
    zero = shards[0].local.new_zeros(1)
    vectors = [norm_of.get(i, zero) if each is None else _local_vector(shards[i], each) for i, each in casts]
    return torch.cat(vectors).float()


def _local_vector(shard: Shard, dim: int | tuple[int, int]) -> Tensor:
    """The amaxes along `dim` (or of blocks) of the shard, at their places among those of the whole weight."""
    if isinstance(dim, tuple):
        of_blocks = _local_blocks if len(shard.size) == 2 else _local_places
        return of_blocks(shard, dim).flatten()
    amax = scaling.amax(shard.local, dim).flatten()
    if shard.dim == dim:
        return amax
    whole = amax.new_zeros(shard.size[1 - dim])
    whole.narrow(0, shard.offset, amax.numel()).copy_(amax)
    return whole


def _local_blocks(shard: Shard, block_size: tuple[int, int]) -> Tensor:
    """The amaxes of the parts of blocks that the shard holds; see [Note: cut blocks]."""
    whole = shard.local.new_zeros(_scale_shape(block_size, shard.size))
    if shard.local.numel() == 0:
        return whole
    first, cut = divmod(shard.offset, block_size[shard.dim])
    before = (0, 0, cut, 0) if shard.dim == 0 else (cut, 0)  # zeros in place of the rows that other ranks hold
    amax = scaling.block_amax(F.pad(shard.local, before) if cut else shard.local, block_size)
    whole.narrow(shard.dim, first, amax.shape[shard.dim]).copy_(amax)
    return whole


def _local_places(shard: Shard, block: Block) -> Tensor:
    """The amaxes of the parts of blocks that a shard of experts holds; see [Note: experts]."""
    count = count_of_scales(block[0], shard.size[0], shard.size[0] * shard.size[1])
    return amax_of_places(shard.local.flatten(0, 1), shard.places(block), count, block[1])[:count]


def _max_over_groups(amaxes: Tensor, only_fsdp: int, shard: Shard) -> Tensor:
    """The maximum over FSDP2's ranks; of all but the first `only_fsdp` over tensor parallelism's too."""
    if shard.tp_group is not None and only_fsdp == 0:
        world = dist.group.WORLD
        if world is not None and world.size() == shard.fsdp_group.size() * shard.tp_group.size():
            return max_over_ranks(amaxes, world)
    amaxes = max_over_ranks(amaxes, shard.fsdp_group)
    if shard.tp_group is None or only_fsdp == amaxes.numel():
        return amaxes
    both = max_over_ranks(amaxes[only_fsdp:].contiguous(), shard.tp_group)
    return torch.cat([amaxes[:only_fsdp], both])


# ---- the weights of a model ------------------------------------------------------------------------------------------

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
    return weight.module.persistent_scales(current_shard(weight).device, recording=False).weight


def _is_sharded(weight: ModuleWeight) -> bool:
    """Whether FSDP2 holds `weight` sharded, to be all-gathered in float8."""
    parameter = weight.parameter
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
    own, key = current_shard(weight), _collective_key(weight)
    siblings = all_gather_state(weight.module).siblings
    stale = [
        (name, each)
        for name, each in siblings.named
        if _needs_scales(each)
        and _all_gather_weight(each).scales(each.parameter) is None
        and _collective_key(each) == key
    ]
    if own.ranks[0] not in siblings.checked:
        check_ranks_agree(_describe(stale), own.fsdp_group, own.device, what=_WHAT)
        siblings.checked.add(own.ranks[0])
    _compute_and_remember([each for _, each in stale])
    return typing.cast(WholeScales, _all_gather_weight(weight).scales(weight.parameter))


def _collective_key(weight: ModuleWeight) -> tuple[Any, ...]:
    """Weights whose scales are computed in one collective have this in common; see [Note: equal groups]."""
    return *current_shard(weight).ranks, *_rule(weight.config)


def _compute_and_remember(weights: Sequence[ModuleWeight]) -> None:
    with torch.no_grad():
        scales = compute_whole_scales([current_shard(each) for each in weights], weights)
    for weight, of_weight in zip(weights, scales, strict=True):
        _all_gather_weight(weight).remember(of_weight, weight.parameter)


_WHAT = "the weights to all-gather in float8"


def _describe(named: NamedWeights) -> list[str]:
    return [f"{name} {list(weight.parameter.shape)}: {weight.config}" for name, weight in named]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the dynamic scales of every weight under `module` that FSDP2 all-gathers in float8, in one all-reduce.

    Call it after `optimizer.step()`, on every rank. Without it the first all-gather of the next step does the same work
    at a moment when the all-gather has to wait for it. Scales stay in use until their weight is written to, by an
    optimizer, by `load_state_dict` or by any operation on the parameter. A module without such weights is left alone,
    and so are weights with a delayed or static scale that is initialized.

    One collective whatever the number of weights, if their configs round scales alike: over the ranks that share the
    weights' shards, and over those of tensor parallelism at the same time if both together are all ranks; otherwise one
    more for tensor parallelism. The first call for a module also checks, in a collective of 16 bytes, that the ranks
    agree about the weights.

    Raises:
        RuntimeError: on every rank, if ranks have different weights to all-gather or different configs for them.
    """
    named = [(name, weight) for name, weight in weights_under(module) if _is_sharded(weight)]
    _check_once(module, named)
    together: dict[tuple[Any, ...], list[ModuleWeight]] = {}
    for _, weight in named:
        if _needs_scales(weight):
            together.setdefault(_collective_key(weight), []).append(weight)
    for weights in together.values():
        _compute_and_remember(weights)


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
