"""The scales of weights that are spread over ranks: as one rank with the whole weight would compute them.

A scale belongs to the whole tensor. Each rank takes the amaxes of its shard, all of them travel in one vector, one
maximum over the ranks makes them those of the whole, and the scales are computed from that vector at once. Whatever the
number of weights: one collective, and for tensorwise scales a fixed number of kernels.

Shapes. FSDP shards a weight [N, K] along dim 0 (or 1); tensor parallelism may have sharded it before, so N and K here
are those of the tensor-parallel part, the shape that FSDP gathers. Under FSDP2 x TP a scale that reduces a dim which
tensor parallelism has sharded takes a second maximum, over that axis. If all do, both are one maximum over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as PlacementShard

from quaver import scaling
from quaver.casts import Scales
from quaver.config import Float8LinearConfig
from quaver.distributed.collectives import max_over_ranks
from quaver.linear import Float8Linear

_SHAPES: dict[int | None, tuple[int, ...]] = {None: (), 0: (1, -1), 1: (-1, 1)}
"""Of scales that reduce a dim, None for both: (), [1, K] or [N, 1]."""


class WholeScales(NamedTuple):
    """The scales of one weight, kept between gathers: those of all its casts in one vector [L], float32."""

    quant: Tensor
    dequant: Tensor | None
    """None where one kernel makes it from `quant`, when it is needed, to the same bits."""
    parts: tuple[tuple[int | None, int], ...]
    """For each cast, in the order of `scale_dims`, the dim that its scales reduce, and how many there are."""

    @classmethod
    def of_one(cls, scales: Scales) -> WholeScales:
        """Of a weight with one tensorwise cast."""
        return cls(scales.quant.view(1), scales.dequant.view(1), ((None, 1),))

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector [L] as the scales of each cast: (), [1, K] or [N, 1]."""
        lengths = [length for _, length in self.parts]
        return [part.view(_SHAPES[dim]) for part, (dim, _) in zip(vector.split(lengths), self.parts, strict=True)]

    def write_dequant(self, vector: Tensor) -> None:
        """Fill `vector` [L] with the dequant_scales; its version counter stays, as that of codes that are gathered."""
        with torch.no_grad(), _unsafe_preserve_version_counter(vector):
            if self.dequant is None:
                torch.reciprocal(self.quant, out=vector)
            else:
                vector.copy_(self.dequant)


class Shard(NamedTuple):
    """Where one rank's shard lies in the weight that FSDP gathers."""

    local: Tensor
    """[n, k], plain; n may be 0."""
    size: tuple[int, int]
    """[N, K]."""
    dim: int
    """The sharded dim."""
    offset: int
    """Where the shard begins along it."""
    fsdp_group: ProcessGroup
    tp_group: ProcessGroup | None
    tp_dim: int | None
    """The dim along which tensor parallelism sharded the weight before."""
    device: torch.device
    """Where the groups' collectives take tensors; an offloaded shard lies elsewhere."""

    def part(self, of_whole: Tensor) -> Tensor:
        """What belongs to this shard of a tensor [N, K], [N, 1] or [1, K]."""
        if of_whole.dim() == 0 or of_whole.shape[self.dim] == 1 != self.size[self.dim]:
            return of_whole
        return of_whole.narrow(self.dim, self.offset, self.local.shape[self.dim])


def scale_dims(config: Float8LinearConfig) -> list[int | None]:
    """The dims that a weight's scales reduce under `config`, one for each cast that differs."""
    for_output = 1 if config.casts.weight.is_rowwise else None
    for_grad_input = 0 if config.casts.weight_for_grad_input.is_rowwise else None
    return [for_output] if for_output == for_grad_input else [for_output, for_grad_input]


class _Wanted(NamedTuple):
    """One vector of amaxes that travels."""

    weight: int
    place: int
    """Among the casts of the weight."""
    dim: int | None
    over_tp: bool

    def length(self, shard: Shard) -> int:
        return 1 if self.dim is None else shard.size[1 - self.dim]


def compute_whole_scales(shards: Sequence[Shard], configs: Sequence[Float8LinearConfig]) -> list[WholeScales]:
    """The scales of every weight; a collective over the ranks that hold the shards, all of which must call it.

    Args:
        shards: of weights that are sharded over the same groups, in the same order on every rank.
        configs: their configs, in the same order.
    """
    wanted = [
        _Wanted(i, place, dim, shard.tp_dim is not None and dim in (None, shard.tp_dim))
        for i, (shard, config) in enumerate(zip(shards, configs, strict=True))
        for place, dim in enumerate(scale_dims(config))
    ]
    wanted.sort(key=lambda want: want.over_tp)  # those that also travel over tensor parallelism stand last, together
    amaxes = _local_amaxes(shards, wanted).to(shards[0].device)
    lengths = [want.length(shards[want.weight]) for want in wanted]
    only_fsdp = sum(length for want, length in zip(wanted, lengths, strict=True) if not want.over_tp)
    amaxes = _largest(amaxes, only_fsdp, shards[0])
    return _scales(amaxes.split(lengths), wanted, configs)


def _local_amaxes(shards: Sequence[Shard], wanted: Sequence[_Wanted]) -> Tensor:
    """This rank's part of every wanted vector, one after another, float32; 0 where another rank's part is."""
    of_whole_shard = [want for want in wanted if want.dim is None and shards[want.weight].local.numel()]
    # One multi-tensor kernel for all tensorwise scales.
    norms = (
        torch._foreach_norm([shards[want.weight].local for want in of_whole_shard], torch.inf) if of_whole_shard else []
    )
    tensorwise = {want.weight: norm.view(1) for want, norm in zip(of_whole_shard, norms, strict=True)}
    zero = shards[0].local.new_zeros(1)
    pieces = []
    for want in wanted:
        shard = shards[want.weight]
        if want.dim is None:
            pieces.append(tensorwise.get(want.weight, zero))
        else:
            pieces.append(_local_vector(shard, want.dim))
    return torch.cat(pieces).float()


def _local_vector(shard: Shard, dim: int) -> Tensor:
    """The amaxes along `dim` of the shard, at their places among those of the whole weight."""
    amax = scaling.amax(shard.local, dim).flatten()
    if shard.dim == dim:
        return amax
    whole = amax.new_zeros(shard.size[1 - dim])
    whole.narrow(0, shard.offset, amax.numel()).copy_(amax)
    return whole


def _largest(amaxes: Tensor, only_fsdp: int, shard: Shard) -> Tensor:
    """The maximum over FSDP's ranks, of all but the first `only_fsdp` over tensor parallelism's too."""
    if shard.tp_group is not None and only_fsdp == 0:
        everyone = dist.group.WORLD
        if everyone is not None and everyone.size() == shard.fsdp_group.size() * shard.tp_group.size():
            return max_over_ranks(amaxes, everyone)
    amaxes = max_over_ranks(amaxes, shard.fsdp_group)
    if shard.tp_group is None or only_fsdp == amaxes.numel():
        return amaxes
    both = max_over_ranks(amaxes[only_fsdp:].contiguous(), shard.tp_group)
    return torch.cat([amaxes[:only_fsdp], both])


def _scales(
    amaxes: Sequence[Tensor],
    wanted: Sequence[_Wanted],
    configs: Sequence[Float8LinearConfig],
) -> list[WholeScales]:
    """Scales from the amaxes of the whole weights, computed together for all configs that scale alike."""
    of_weight: list[list[tuple[int | None, Tensor]]] = [[] for _ in configs]
    for want, amax in sorted(zip(wanted, amaxes, strict=True), key=lambda each: each[0].place):
        of_weight[want.weight].append((want.dim, amax))
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    for weight, config in enumerate(configs):
        key = (config.casts.weight.float8_dtype, config.round_scales_to_power_of_2)
        alike.setdefault(key, []).append(weight)
    result = {}
    for (float8_dtype, power_of_2), weights in alike.items():
        together = torch.cat([amax for weight in weights for _, amax in of_weight[weight]])
        parts = [tuple((dim, amax.numel()) for dim, amax in of_weight[weight]) for weight in weights]
        lengths = [sum(length for _, length in of_one) for of_one in parts]
        quant = scaling.amax_to_quant_scale(together, float8_dtype, power_of_2=power_of_2)
        dequants: Sequence[Tensor | None] = [None] * len(weights)
        if not _is_reciprocal(quant, power_of_2):
            dequants = scaling.to_dequant_scale(quant).split(lengths)
        for weight, q, d, of_one in zip(weights, quant.split(lengths), dequants, parts, strict=True):
            result[weight] = WholeScales(q, d, of_one)
    return [result[weight] for weight in range(len(configs))]


def _is_reciprocal(quant: Tensor, power_of_2: bool) -> bool:
    """Whether `torch.reciprocal` gives what `to_dequant_scale` does: on a CPU the same, of powers of two exactly."""
    return quant.is_cpu or power_of_2


def shard_of(linear: Float8Linear, local: Tensor) -> Shard:
    """The shard of a linear's weight while FSDP holds it sharded.

    Args:
        local: the plain tensor of the shard.
    """
    weight = linear.weight
    if not isinstance(weight, DTensor):
        raise RuntimeError(f"expected a sharded weight, got {type(weight).__name__}; reshard the model first")
    sharding = linear.sharding
    tp_axes = 0 if sharding is None else sharding.mesh.ndim
    mesh, placements = weight.device_mesh, weight.placements
    axes = [axis for axis in range(mesh.ndim - tp_axes) if hasattr(placements[axis], "dim")]  # Shard or _StridedShard
    if len(axes) != 1:
        raise NotImplementedError(f"expected a weight that FSDP2 shards over one mesh axis, got {placements} on {mesh}")
    axis, dim = axes[0], cast(PlacementShard, placements[axes[0]]).dim
    group = mesh.get_group(axis)
    size = list(weight.shape)
    tp_group = tp_dim = None
    if sharding is not None:
        tp_group, tp_dim = sharding.group, sharding.weight_dim
        size[tp_dim] = sharding.weight_length
    chunk = -(-size[dim] // group.size())
    offset = min(mesh.get_local_rank(axis) * chunk, size[dim])
    device = torch.device(mesh.device_type)
    return Shard(local, (size[0], size[1]), dim, offset, group, tp_group, tp_dim, device)
