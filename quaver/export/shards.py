"""The float8 codes of a weight that ranks share, while no rank has all of its values.

A scale belongs to the whole matrix, wherever ranks cut it. Each rank takes the amaxes of its part, the ranks agree on
their maximum, and each casts its part with the scales of the whole. The codes are gathered, one byte an element.

Any mesh and placements will do: FSDP2 over one axis or with replicas, tensor parallelism of either dim, experts that
are split over ranks, and these together. fsdp/scales.py has the same sums for a step of training, over FSDP2's groups
and for all weights of a model at once; there a scale belongs to the part of tensor parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.fsdp.scales import rounding_rule
from quaver.kernels.cast import cast_blocks_with_scale, cast_with_scale
from quaver.kernels.operands import Operand, present
from quaver.recipes import scaling
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scaling import factor_of, scales_of_parts
from quaver.runtime.collectives import max_over_ranks
from quaver.torch_private.dtensor import distributed_like, local_shape_and_offset


def whole_amaxes(weight: DTensor, local: Tensor, config: Float8LinearConfig) -> Tensor:
    """The amaxes of a weight's row cast, float32 [E, rows of scales, columns of scales], equal on every rank.

    A collective over the mesh of `weight`.

    Args:
        weight: [N, K], or a stack of E matrices [E, N, K].
        local: this rank's part, in the dtype that is cast.
    """
    layout, (experts, *size) = _layout(config), _stack(weight.shape)
    first, *offset = _stack(local_shape_and_offset(weight)[1], leading=0)
    counts = [1 if length == ALL else -(-n // length) for length, n in zip(layout[:2], size, strict=True)]
    amaxes = torch.zeros(experts, *counts, device=local.device)
    if local.numel():
        for index, matrix in enumerate(local.view(_stack(local.shape)), start=first):
            amax, corner = _amaxes(matrix, offset, layout)
            amaxes[index].narrow(0, corner[0], amax.shape[0]).narrow(1, corner[1], amax.shape[1]).copy_(amax)
    amaxes = amaxes.to(weight.device_mesh.device_type)  # an offloaded part lies elsewhere
    for axis, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            amaxes = max_over_ranks(amaxes, weight.device_mesh.get_group(axis))
    return amaxes


def whole_operands(weight: DTensor, local: Tensor, config: Float8LinearConfig, amaxes: Tensor) -> list[Operand]:
    """The row operand of each matrix of a weight, [N, K], equal on every rank; a collective over its mesh.

    `amaxes`: of `whole_amaxes`; the other arguments are as there.
    """
    layout, size = _layout(config), _stack(weight.shape)[1:]
    first, *offset = _stack(local_shape_and_offset(weight)[1], leading=0)
    rule = rounding_rule(config)
    of_parts = amaxes.flatten().to(local.dtype)  # exact: some rules round scales to it
    scales = scales_of_parts(of_parts, [amaxes.numel()], *rule)[0]
    factor, divisor_of = factor_of(scales, rule[-1] or "")
    factor = factor.view_as(amaxes)
    quant, dequant = scales.quant.view_as(amaxes), scales.dequant.view_as(amaxes)
    codes = torch.empty(local.shape, dtype=config.casts.weight.row.float8_dtype, device=local.device)
    if local.numel():
        parts = codes.view(_stack(local.shape))
        for index, matrix in enumerate(local.view(_stack(local.shape))):
            of_matrix = factor[first + index].to(local.device)
            parts[index].copy_(_codes(matrix, of_matrix, offset, layout, codes.dtype, divisor_of))
    as_bytes = codes.view(torch.uint8).to(weight.device_mesh.device_type)  # which every backend gathers
    gathered = distributed_like(as_bytes, weight).full_tensor().view(codes.dtype)
    shape = layout.scale_shape(*size)
    return [
        Operand(matrix, dequant[index].view(shape), layout, quant[index].view(shape))
        for index, matrix in enumerate(gathered.view(_stack(weight.shape)))
    ]


def _layout(config: Float8LinearConfig) -> ScaleLayout:
    return config.casts.weight.row.known_layout("export")


def _stack(shape: tuple[int, ...] | torch.Size, leading: int = 1) -> tuple[int, ...]:
    """A shape of three dims; a matrix is a stack of `leading`."""
    return (leading, *shape) if len(shape) == 2 else tuple(shape)


def _amaxes(matrix: Tensor, offset: list[int], layout: ScaleLayout) -> tuple[Tensor, list[int]]:
    """The amaxes [r, c] of what a part at `offset` holds of the blocks of the whole, and where the first one lies."""
    cut = [0 if length == ALL else o % length for length, o in zip(layout[:2], offset, strict=True)]
    corner = [0 if length == ALL else o // length for length, o in zip(layout[:2], offset, strict=True)]
    if layout.is_tensorwise:
        return scaling.amax(matrix).view(1, 1), corner
    if layout.columns == ALL:
        return scaling.amax(matrix, 1), corner
    before = (cut[1], 0, cut[0], 0)  # zeros in place of what other ranks hold of the first blocks
    return scaling.block_amax(F.pad(matrix, before) if any(cut) else matrix, layout), corner


def _codes(
    matrix: Tensor, factor: Tensor, offset: list[int], layout: ScaleLayout, dtype: torch.dtype, divisor_of: str
) -> Tensor:
    """The codes of a part at `offset`; `factor` [rows, columns of scales], of `factor_of`, is that of the whole."""
    lengths = list(layout[:2])
    for dim, (length, first, n) in enumerate(zip(layout[:2], offset, matrix.shape, strict=True)):
        if length == ALL:
            continue
        corner, cut = divmod(first, length)
        factor = factor.narrow(dim, corner, -(-(cut + n) // length))
        if cut:  # a block begins before the part: each row, or column, gets the scale of its block
            factor, lengths[dim] = factor.repeat_interleave(length, dim).narrow(dim, cut, n), 1
    if layout.is_blockwise:
        layout = layout._replace(rows=lengths[0], columns=lengths[1])
        return cast_blocks_with_scale(matrix, factor.contiguous(), dtype, layout, False, divisor_of)
    scale = factor.view(()) if layout.is_tensorwise else factor
    return present(cast_with_scale(matrix.contiguous(), dtype, scale, None, divisor_of)[0])
