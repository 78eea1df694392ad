"""Scales of sharded weights, bit-identical to the scales that one rank computes from the whole weight.

A scale belongs to the whole tensor. Each rank computes the amaxes of its shards, one all-reduce takes their maximum
over the ranks, and the scales of all weights are computed from that vector at once. So the number of collectives, and
with tensorwise scales the number of kernels, does not depend on the number of weights.

A scale that reduces a dim which tensor parallelism sharded needs a second maximum, over that mesh axis. If all scales
do, and both axes together span all ranks, one maximum over all ranks serves both.

[Note: cut blocks] A shard may begin inside a block. It then computes the amaxes of the parts of blocks that it holds,
and the maximum over the ranks completes them. Each row of a shard is quantized with its blocks' scales.

[Note: experts] A weight [E, R, C] is E matrices that share no scales (experts/groups.py). Each row of a shard has a row
among the scales, and a rank computes the amaxes of its shard's rows. The other ranks of expert parallelism hold other
experts, and so other scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.experts.cast import compute_scale_row_amax
from quaver.experts.function import get_parameter_layouts
from quaver.experts.groups import count_scale_rows, get_scale_shape
from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight
from quaver.fsdp.shard import LocatedShard
from quaver.recipes import scaling
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.part_scales import compute_part_amaxes
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import CastScales, compute_scales_of_parts
from quaver.runtime.collectives import all_reduce_max


@dataclass(frozen=True, eq=False)
class _WeightCast:
    """A cast of the weight of `shard`, with the layout of its scales."""

    shard: LocatedShard
    layout: ScaleLayout

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the whole weight's scales."""
        if len(self.shard.whole_shape) == 3:
            experts, rows, columns = self.shard.whole_shape
            return get_scale_shape(self.layout, experts, experts * rows, columns)
        return self.layout.get_scale_shape(*self.shard.whole_shape)

    @property
    def reduces_tp_dim(self) -> bool:
        """Whether tensor parallelism sharded the dim that the scales reduce."""
        return self.shard.tp_dim is not None and self.layout[self.shard.tp_dim] == ALL


def list_layouts(weight: ModuleWeight) -> list[ScaleLayout]:
    """Return the layout of the weight's cast, or of the row and the column cast if they differ."""
    if isinstance(weight.module, Float8Experts):
        row, column = get_parameter_layouts(weight.config, weight.is_transposed)
        return [row] if row == column else [row, column]
    return list_linear_layouts(weight.config.casts.weight)


def list_linear_layouts(casts: OperandCasts) -> list[ScaleLayout]:
    """Return `list_layouts` of a linear whose weight has these casts."""
    row = casts.row.require_layout("float8 all-gather", allows_packed=True)
    column = row
    if not casts.is_dequantized:
        column = casts.column.require_layout("float8 all-gather", allows_packed=True).get_column_layout()
    return [row] if row == column else [row, column]


def compute_whole_scales(shards: Sequence[LocatedShard], weights: Sequence[ModuleWeight]) -> list[list[CastScales]]:
    """Compute the scales of every weight, one for each cast in the order of `list_layouts`.

    A collective: all ranks that hold the shards must call it. experts/groups.py describes the scales of experts.

    Args:
        shards: shards of weights over the same groups, in the same order on every rank.
        weights: the weights of the shards, in the same order. `get_scale_arguments` returns the same for all of them.
    """
    casts_by_weight = [
        [_WeightCast(shard, layout) for layout in list_layouts(weight)]
        for shard, weight in zip(shards, weights, strict=True)
    ]
    # Those over the ranks of tensor parallelism come last, so that their amaxes are one slice.
    casts = sorted(itertools.chain(*casts_by_weight), key=lambda cast: cast.reduces_tp_dim)
    lengths = [math.prod(cast.scale_shape) for cast in casts]
    tp_start = sum(length for cast, length in zip(casts, lengths, strict=True) if not cast.reduces_tp_dim)
    amaxes = _reduce_amaxes(_compute_local_amaxes(casts).to(shards[0].device), tp_start, shards[0])
    parts = compute_scales_of_parts(amaxes, lengths, *get_scale_arguments(weights[0].config))
    scales: dict[_WeightCast, CastScales] = {}
    for cast, part in zip(casts, parts, strict=True):
        shape = cast.scale_shape
        scales[cast] = part._replace(quant=part.quant.view(shape), dequant=part.dequant.view(shape))
    return [[scales[cast] for cast in weight_casts] for weight_casts in casts_by_weight]


def get_scale_arguments(config: Float8LinearConfig) -> tuple[torch.dtype, bool, str, bool]:
    """Return the last arguments of `compute_scales_of_parts`. Weights that share them are computed in one call."""
    weight = config.casts.weight
    return weight.row.float8_dtype, weight.power_of_2, weight.row.rule, weight.row.is_blockwise


def _compute_local_amaxes(casts: Sequence[_WeightCast]) -> Tensor:
    """Compute this rank's amaxes for `casts`, concatenated, float32; 0 for the elements of other ranks."""
    tensorwise = [cast for cast in casts if cast.layout.is_tensorwise and len(cast.shard.whole_shape) == 2]
    amaxes = dict.fromkeys(tensorwise, casts[0].shard.local.new_zeros(1))
    nonempty = [cast for cast in tensorwise if cast.shard.local.numel()]
    if nonempty:  # one multi-tensor kernel for all of them
        norms = torch._foreach_norm([cast.shard.local for cast in nonempty], torch.inf)
        amaxes.update({cast: norm.view(1) for cast, norm in zip(nonempty, norms, strict=True)})
    vectors = [amaxes[cast] if cast in amaxes else _compute_shard_amaxes(cast).flatten() for cast in casts]
    return torch.cat(vectors).float()


def _compute_shard_amaxes(cast: _WeightCast) -> Tensor:
    """Compute the amaxes of the shard at their places among the whole weight's; 0 elsewhere."""
    shard, layout = cast.shard, cast.layout
    if len(shard.whole_shape) == 3:
        return _compute_scale_row_amaxes(shard, layout)
    if layout.is_blockwise:
        return _compute_block_amaxes(cast)
    dim = layout.index(ALL)
    amax = scaling.compute_amax(shard.local, dim).flatten()
    if shard.dim == dim:
        return amax
    amaxes = amax.new_zeros(shard.whole_shape[1 - dim])
    amaxes.narrow(0, shard.offset, amax.numel()).copy_(amax)
    return amaxes


def _compute_block_amaxes(cast: _WeightCast) -> Tensor:
    """Compute the amaxes of the parts of blocks that the shard holds; see [Note: cut blocks]."""
    shard = cast.shard
    amaxes = shard.local.new_zeros(cast.scale_shape)
    if shard.local.numel() == 0:
        return amaxes
    amax, corner = compute_part_amaxes(shard.local, shard.offsets, cast.layout)
    amaxes.narrow(shard.dim, corner[shard.dim], amax.shape[shard.dim]).copy_(amax)
    return amaxes


def _compute_scale_row_amaxes(shard: LocatedShard, layout: ScaleLayout) -> Tensor:
    """Compute the amaxes of the parts of blocks that a shard of experts holds; see [Note: experts]."""
    count = count_scale_rows(layout.rows, shard.whole_shape[0], shard.whole_shape[0] * shard.whole_shape[1])
    rows, scale_rows = shard.local.flatten(0, 1), shard.find_scale_rows(layout)
    return compute_scale_row_amax(rows, scale_rows, count, layout.columns)[:count]


def _reduce_amaxes(amaxes: Tensor, tp_start: int, shard: LocatedShard) -> Tensor:
    """Take the maximum over FSDP2's ranks; from index `tp_start` on also over the ranks of tensor parallelism."""
    if shard.tp_group is not None and tp_start == 0:
        world = dist.group.WORLD
        if world is not None and world.size() == shard.fsdp_group.size() * shard.tp_group.size():
            return all_reduce_max(amaxes, world)
    amaxes = all_reduce_max(amaxes, shard.fsdp_group)
    if shard.tp_group is None or tp_start == amaxes.numel():
        return amaxes
    tp_amaxes = all_reduce_max(amaxes[tp_start:].contiguous(), shard.tp_group)
    return torch.cat([amaxes[:tp_start], tp_amaxes])
