"""A saved activation as float8 codes: e4m3 in blocks of consecutive elements, each with a scale that is a power of two.

A block is `block_size` elements that are neighbours in memory, so a transposed view of a matrix has the codes of the
matrix. Where blocks do not fill the tensor, they start again at each row of the innermost dim. A block of 128 takes
1.03 bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quaver.kernels.cast import cast_blockwise
from quaver.kernels.operands import Operand
from quaver.kernels.operation import operation
from quaver.kernels.widen import widen
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.devices import is_cpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations that can be stored as codes."""


class MemoryLayout:
    """How the elements of a tensor follow each other in memory, and how they become such a tensor again.

    Args:
        tensor: [...], of any strides; one that is not dense becomes dense.
        block_size: elements that share a scale.
    """

    __slots__ = ("columns", "dtype", "is_dense", "order", "shape")

    def __init__(self, tensor: Tensor, block_size: int) -> None:
        strides = tensor.stride()
        self.order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        self.shape = [tensor.shape[dim] for dim in self.order]
        self.dtype = tensor.dtype
        self.is_dense = tensor.numel() == 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
        fills = tensor.numel() % block_size == 0
        self.columns = block_size if fills else self.shape[-1]

    def matrix_of(self, tensor: Tensor) -> Tensor:
        """The elements [rows, columns], a view where the tensor is dense."""
        return tensor.permute(self.order).reshape(-1, self.columns)

    def tensor_of(self, matrix: Tensor) -> Tensor:
        """Undo `matrix_of`: a tensor of the first shape, with its order of strides."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view(self.shape).permute(back)


def encode(matrix: Tensor, block_size: int) -> Operand:
    """Codes [rows, columns] in float8_e4m3fn, and dequantization scales float32 [rows, ceil(columns / block_size)]."""
    row: Operand = cast_blockwise(matrix, torch.float8_e4m3fn, True, False, True, 1, block_size, "").row
    return row


def _decode_blocks(codes: Tensor, scale: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values in `dtype` of what `encode` returned.

    Raises:
        ValueError: a scale of another shape.
    """
    _, columns = _checked(codes, scale, layout).block(codes.shape)
    wide_dtype = torch.float32 if dtype is torch.float16 else dtype
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(columns, dim=1)[:, : codes.shape[1]]
    return (codes.to(wide_dtype) * scale.to(wide_dtype)).to(dtype)


def _cpu_decode_blocks(codes: Tensor, scale: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    of_scale = _checked(codes, scale, layout)
    return widen(codes, torch.float32 if dtype is torch.float16 else dtype, scale, of_scale).to(dtype)


def _checked(codes: Tensor, scale: Tensor, layout: Sequence[int]) -> ScaleLayout:
    known = ScaleLayout(*layout)
    if codes.dim() != 2 or scale.shape != known.scale_shape(codes.shape[0], codes.shape[1]):
        raise ValueError(f"expected a {known} scale for codes {list(codes.shape)}, got {list(scale.shape)}")
    return known


decode = operation(_decode_blocks, results=1, cpu=_cpu_decode_blocks)


def decode_in_graph(codes: Tensor, scale: Tensor, layout: ScaleLayout, dtype: torch.dtype) -> Tensor:
    """`decode` for a graph: the operation on a CPU; on a GPU PyTorch, which Inductor fuses with what reads it."""
    return (decode if is_cpu(codes) else _decode_blocks)(codes, scale, layout, dtype)
