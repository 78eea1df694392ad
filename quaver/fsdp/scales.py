"""Scales of sharded weights, equal to those that one rank with the whole weight would compute.

A scale belongs to the whole tensor. Each rank takes the amaxes of its shards, one all-reduce takes their maximum over
the ranks, and the scales of all weights are computed from that vector at once: one collective and, for tensorwise
scales, a fixed number of kernels, whatever the number of weights.

[Note: cut blocks] A shard begins at any row, inside a block or not. Its amaxes are those of the parts of blocks that it
holds; the maximum over the ranks makes them whole. A rank then quantizes its shard with each row's blocks of scales.

[Note: two maxima] A scale that reduces a dim which tensor parallelism sharded takes a second maximum, over that mesh
axis. If all do, both are one maximum over all ranks.

[Note: experts] A weight [E, R, C] is E matrices, each with scales of its own (experts/groups.py). Each row of a shard
has a row among the scales, and a rank takes the amaxes in the rows that belong to its shard. No scale is shared with
the other ranks of expert parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from quaver.experts.cast import amax_of_scale_rows
from quaver.experts.grouped_mm import layouts_of_stored
from quaver.experts.groups import count_of_scales, shape_of_scales
from quaver.experts.module import Float8Experts, is_transposed
from quaver.experts.module_weight import ModuleWeight
from quaver.fsdp.shard import Shard
from quaver.recipes import scaling
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import Scales, scales_of_parts
from quaver.runtime.collectives import max_over_ranks

WholeScales = Sequence[Scales]
"""The scales of one weight [N, K], one for each cast, in the order of `layouts_of`; of experts those of
experts/groups.py."""


def _scale_shape(layout: ScaleLayout, size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of `size`."""
    if len(size) == 3:
        return shape_of_scales(layout, size[0], size[0] * size[1], size[2])
    return layout.scale_shape(size[0], size[1])


def layouts_of(weight: ModuleWeight) -> list[ScaleLayout]:
    """How a weight is scaled, one for each cast that differs."""
    if isinstance(weight.module, Float8Experts):
        row, column = layouts_of_stored(weight.config, is_transposed(weight.module))
    else:
        casts = weight.config.casts.weight
        row = casts.row.known_layout("float8 all-gather")
        column = row if casts.is_dequantized else casts.column.known_layout("float8 all-gather").turned()
    return [row] if row == column else [row, column]


def compute_whole_scales(shards: Sequence[Shard], weights: Sequence[ModuleWeight]) -> list[WholeScales]:
    """The scales of every weight; a collective over the ranks that hold the shards, all of which must call it.

    Args:
        shards: shards of weights over the same groups, in the same order on every rank.
        weights: what they are shards of, in the same order, of one float8 dtype and one way to round scales.
    """

    def is_over_tp(key: tuple[int, ScaleLayout]) -> bool:
        """Whether tensor parallelism sharded the dim that the scales of a cast reduce."""
        tp_dim = shards[key[0]].tp_dim
        return tp_dim is not None and key[1][tp_dim] == ALL

    # The key of a cast: the index of its weight, and the layout of its scales. Those over TP stand last.
    casts = sorted(((i, each) for i, weight in enumerate(weights) for each in layouts_of(weight)), key=is_over_tp)
    shapes = [_scale_shape(each, shards[i].size) for i, each in casts]
    lengths = [math.prod(shape) for shape in shapes]
    only_fsdp = sum(length for key, length in zip(casts, lengths, strict=True) if not is_over_tp(key))
    amaxes = _max_over_groups(_local_amaxes(shards, casts).to(shards[0].device), only_fsdp, shards[0])
    parts = scales_of_parts(amaxes, lengths, *rounding_rule(weights[0].config))
    made: dict[tuple[int, ScaleLayout], Scales] = {}
    for key, shape, part in zip(casts, shapes, parts, strict=True):
        made[key] = part._replace(quant=part.quant.view(shape), dequant=part.dequant.view(shape))
    return [[made[i, each] for each in layouts_of(weight)] for i, weight in enumerate(weights)]


def rounding_rule(config: Float8LinearConfig) -> tuple[torch.dtype, bool, str | None]:
    """The last arguments of `scales_of_parts`: weights that share them have their scales computed at once."""
    weight = config.casts.weight
    return weight.row.float8_dtype, weight.power_of_2, weight.row.scales_mode


def _local_amaxes(shards: Sequence[Shard], casts: Sequence[tuple[int, ScaleLayout]]) -> Tensor:
    """This rank's amaxes for `casts`, one after another, float32; 0 where another rank's shard is."""

    def is_one_norm(i: int, layout: ScaleLayout) -> bool:
        return layout.is_tensorwise and len(shards[i].size) == 2

    tensorwise = [i for i, each in casts if is_one_norm(i, each) and shards[i].local.numel()]
    # One multi-tensor kernel for all tensorwise scales.
    norms = torch._foreach_norm([shards[i].local for i in tensorwise], torch.inf) if tensorwise else []
    norm_of = {i: norm.view(1) for i, norm in zip(tensorwise, norms, strict=True)}
    zero = shards[0].local.new_zeros(1)
    vectors = [norm_of.get(i, zero) if is_one_norm(i, each) else _local_vector(shards[i], each) for i, each in casts]
    return torch.cat(vectors).float()


def _local_vector(shard: Shard, layout: ScaleLayout) -> Tensor:
    """The amaxes of the shard, in their rows and columns of those of the whole weight."""
    if len(shard.size) == 3:
        return _local_scale_rows(shard, layout).flatten()
    if layout.is_blockwise:
        return _local_blocks(shard, layout).flatten()
    dim = layout.index(ALL)
    amax = scaling.amax(shard.local, dim).flatten()
    if shard.dim == dim:
        return amax
    whole = amax.new_zeros(shard.size[1 - dim])
    whole.narrow(0, shard.offset, amax.numel()).copy_(amax)
    return whole


def _local_blocks(shard: Shard, layout: ScaleLayout) -> Tensor:
    """The amaxes of the parts of blocks that the shard holds; see [Note: cut blocks]."""
    whole = shard.local.new_zeros(_scale_shape(layout, shard.size))
    if shard.local.numel() == 0:
        return whole
    first, cut = divmod(shard.offset, layout[shard.dim])
    before = (0, 0, cut, 0) if shard.dim == 0 else (cut, 0)  # zeros in place of the rows that other ranks hold
    amax = scaling.block_amax(F.pad(shard.local, before) if cut else shard.local, layout)
    whole.narrow(shard.dim, first, amax.shape[shard.dim]).copy_(amax)
    return whole


def _local_scale_rows(shard: Shard, layout: ScaleLayout) -> Tensor:
    """The amaxes of the parts of blocks that a shard of experts holds; see [Note: experts]."""
    count = count_of_scales(layout.rows, shard.size[0], shard.size[0] * shard.size[1])
    return amax_of_scale_rows(shard.local.flatten(0, 1), shard.scale_rows(layout), count, layout.columns)[:count]


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
