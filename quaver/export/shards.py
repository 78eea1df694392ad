"""Quantizes a sharded weight for an export and gathers its codes, so that no rank holds all high-precision values.

A scale belongs to the whole matrix, wherever its shards end. Each rank computes the amaxes of its shard, the ranks
reduce them to their maximum, and each rank casts its shard with the scales of the whole matrix. The codes are
all-gathered, one byte per element.

All meshes and placements work. This covers FSDP2 with or without replicas, tensor parallelism along either dim, experts
that are split over ranks, and their combinations. fsdp/scales.py does the same in a training step, over FSDP2's groups
and for all weights of a model at once. There a scale belongs to the shard of tensor parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.fsdp.scales import get_scale_arguments
from quaver.kernels.cast import cast_blocks_with_scale, cast_with_scale
from quaver.kernels.operands import Operand, require
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.part_scales import compute_part_amaxes, select_part_scales
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import choose_factor, compute_scales_of_parts
from quaver.runtime.collectives import all_reduce_max
from quaver.torch_private.dtensor import compute_local_shape_and_offset, make_dtensor_like


def compute_whole_amaxes(weight: DTensor, local: Tensor, config: Float8LinearConfig) -> Tensor:
    """Return the amaxes of a weight's row cast, float32 [E, rows of scales, columns of scales], equal on every rank.

    It runs a collective over the mesh of `weight`.

    Args:
        weight: [N, K], or a stack of E matrices [E, N, K].
        local: this rank's shard, in the dtype that is cast.
    """
    layout, (experts, *size) = _get_layout(config), _add_stack_dim(weight.shape)
    first, *offset = _add_stack_dim(compute_local_shape_and_offset(weight)[1], leading=0)
    counts = [1 if length == ALL else -(-n // length) for length, n in zip(layout.block_size, size, strict=True)]
    amaxes = torch.zeros(experts, *counts, dtype=torch.float32, device=local.device)
    if local.numel():
        for index, matrix in enumerate(local.view(_add_stack_dim(local.shape)), start=first):
            amax, corner = compute_part_amaxes(matrix, offset, layout)
            amaxes[index].narrow(0, corner[0], amax.shape[0]).narrow(1, corner[1], amax.shape[1]).copy_(amax)
    amaxes = amaxes.to(weight.device_mesh.device_type)  # an offloaded shard is on the CPU
    for axis, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            amaxes = all_reduce_max(amaxes, weight.device_mesh.get_group(axis))
    return amaxes


def gather_whole_operands(weight: DTensor, local: Tensor, config: Float8LinearConfig, amaxes: Tensor) -> list[Operand]:
    """Return the row operand [N, K] of each matrix of a weight, equal on every rank.

    It runs a collective over the mesh of `weight`. `amaxes`: the result of `compute_whole_amaxes` for the same weight.
    """
    layout, size = _get_layout(config), _add_stack_dim(weight.shape)[1:]
    first, *offset = _add_stack_dim(compute_local_shape_and_offset(weight)[1], leading=0)
    flat_amaxes = amaxes.flatten().to(local.dtype)  # exact: some rules round scales to it
    scales = compute_scales_of_parts(flat_amaxes, [amaxes.numel()], *get_scale_arguments(config))[0]
    rule = config.casts.weight.row.rule
    factor = choose_factor(scales, rule).view_as(amaxes)
    quant, dequant = scales.quant.view_as(amaxes), scales.dequant.view_as(amaxes)
    codes = torch.empty(local.shape, dtype=config.casts.weight.row.float8_dtype, device=local.device)
    if local.numel():
        parts = codes.view(_add_stack_dim(local.shape))
        for index, matrix in enumerate(local.view(_add_stack_dim(local.shape))):
            matrix_factor = factor[first + index].to(local.device)
            parts[index].copy_(_cast_part(matrix, matrix_factor, offset, layout, codes.dtype, rule))
    as_bytes = codes.view(torch.uint8).to(weight.device_mesh.device_type)  # every backend gathers bytes
    gathered = make_dtensor_like(as_bytes, weight).full_tensor().view(codes.dtype)
    shape = layout.get_scale_shape(*size)
    return [
        Operand(matrix, dequant[index].view(shape), layout, quant[index].view(shape))
        for index, matrix in enumerate(gathered.view(_add_stack_dim(weight.shape)))
    ]


def _get_layout(config: Float8LinearConfig) -> ScaleLayout:
    return config.casts.weight.row.require_layout("export")


def _add_stack_dim(shape: tuple[int, ...] | torch.Size, leading: int = 1) -> tuple[int, ...]:
    """Return a shape, or an offset, with three dims. `leading` is the first dim of a matrix."""
    return (leading, *shape) if len(shape) == 2 else tuple(shape)


def _cast_part(
    matrix: Tensor, factor: Tensor, offset: list[int], layout: ScaleLayout, dtype: torch.dtype, rule: str
) -> Tensor:
    """Return the codes of a shard at `offset`. `factor`: of the whole matrix, from `choose_factor`."""
    factor, layout = select_part_scales(factor, offset, matrix.shape, layout)
    if layout.is_blockwise:
        return cast_blocks_with_scale(matrix, factor.contiguous(), dtype, layout, False, rule)
    scale = factor.view(()) if layout.is_tensorwise else factor
    return require(cast_with_scale(matrix.contiguous(), dtype, scale, None, rule)[0], "the tensor of row codes")
