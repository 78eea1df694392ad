"""The codes and scales of an expert as a checkpoint stores them: gate and up apart, which are one in the forward.

    scales               gate and up of gate_up_proj [2 F, D]
    a row                each has its own rows
    a tensor             both have the scale of the whole
    128 x 128 blocks     each has its own rows of blocks, where F is a multiple of 128

Otherwise a block of the forward has rows of both, which no checkpoint holds: gate and up are quantized again, each in
blocks from its own first row. So are weights of recipes without such blocks.
"""

from __future__ import annotations

import typing
from typing import NamedTuple

from torch import Tensor

from quaver.config import OperandCasts
from quaver.formats import E4M3
from quaver.gemm import Operand
from quaver.quantize import Quantizer, present
from quaver.scaling import BLOCK_SIZE, dynamic_cast_blocks


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
    weight: Tensor, of_forward: Operand, casts: OperandCasts, parts: int, is_in_blocks: bool
) -> StoredExpert:
    """What a checkpoint holds of the matrix of one expert.

    Args:
        weight: [N, K], as the forward reads it.
        of_forward: the operand of its matmul.
        casts: of the weight.
        parts: into how many matrices of N / parts rows a checkpoint cuts it.
        is_in_blocks: whether the format has scales of 128 x 128 blocks.
    """
    square = (BLOCK_SIZE, BLOCK_SIZE)
    has_blocks = casts.row.is_blockwise and casts.row.block_size == square
    is_cut_between_blocks = parts == 1 or weight.shape[0] // parts % BLOCK_SIZE == 0
    if not is_in_blocks or (has_blocks and is_cut_between_blocks):
        return StoredExpert(_cut(of_forward, parts), False)
    power_of_2 = has_blocks and casts.power_of_2
    again = [dynamic_cast_blocks(each, E4M3.dtype, power_of_2=power_of_2) for each in weight.chunk(parts)]
    return StoredExpert([Operand(codes, scale) for codes, _, scale in again], True)


def _cut(operand: Operand, parts: int) -> list[Operand]:
    scale = typing.cast(Tensor, operand.dequant_scale)
    scales = scale.chunk(parts) if scale.dim() else [scale] * parts
    return [Operand(codes, each) for codes, each in zip(operand.data.chunk(parts), scales, strict=True)]
