"""The codes and scales of an expert as a checkpoint stores them: gate and up apart, which are one in the forward.

    scales               gate and up of gate_up_proj [2 F, D]
    a row                each has its own rows
    a tensor             both have the scale of the whole
    128 x 128 blocks     each has its own rows of blocks, where F is a multiple of 128
    MXFP8                each has its own rows, with the scales of their 32 x 32 blocks

Otherwise a block of the forward has rows of both, which no checkpoint holds: gate and up are quantized again, each in
blocks from its own first row. So are weights of recipes without such blocks.
"""

from __future__ import annotations

import typing
from typing import NamedTuple

from torch import Tensor

from quaver.export.formats import WeightFormat
from quaver.kernels.operands import Operand, present
from quaver.linear.quantize import Quantizer
from quaver.recipes.linear_casts import OperandCasts


class StoredExpert(NamedTuple):
    """The matrix of one expert in a checkpoint."""

    parts: list[Operand]
    """The matrices that the checkpoint holds, whose rows follow each other."""
    is_requantized: bool
    """Whether the parts have other codes or scales than the forward."""


def quantize_expert(weight: Tensor, casts: OperandCasts) -> Operand:
    """The matrix [N, K] of one expert as the forward multiplies by it."""
    return present(Quantizer(casts, weight.dtype)(weight, row=True, column=False).row)


def store_expert(
    weight: Tensor, of_forward: Operand, casts: OperandCasts, parts: int, format: WeightFormat
) -> StoredExpert:
    """Quantize the matrix of one expert as a checkpoint stores it, or take the codes of its forward where they fit.

    Args:
        weight: [N, K], as the forward reads it.
        of_forward: the operand of its matmul.
        casts: of the weight.
        parts: into how many matrices of N / parts rows a checkpoint cuts it.
        format: of the checkpoint.
    """
    held, rows = format.held(of_forward, casts.row), weight.shape[0] // parts
    is_cut_between_blocks = parts == 1 or format.block_size is None or rows % format.block_size[0] == 0
    if held is not None and is_cut_between_blocks:
        return StoredExpert(_cut(held, parts), False)
    power_of_2 = held is not None and casts.power_of_2
    return StoredExpert([format.quantized(each, power_of_2=power_of_2) for each in weight.chunk(parts)], True)


def _cut(operand: Operand, parts: int) -> list[Operand]:
    scale = typing.cast(Tensor, operand.dequant_scale)
    scales = scale.chunk(parts) if scale.dim() else [scale] * parts
    return [Operand(codes, each) for codes, each in zip(operand.data.chunk(parts), scales, strict=True)]
