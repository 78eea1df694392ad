"""Float8 codes of a saved activation: e4m3 in blocks of consecutive elements, each with a power-of-two scale.

The `block_size` elements of a block are adjacent in memory, so a matrix and its transposed view have the same codes. If
the number of elements is not a multiple of `block_size`, blocks start again at each row of the innermost dim. Blocks of
128 take 1.03 bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quaver.kernels.cast import cast_blockwise
from quaver.kernels.operands import BlockCast, Operand, require
from quaver.kernels.operation import register_operation
from quaver.kernels.widen import widen
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.devices import is_cpu

STORABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations that can be stored as codes."""


class MemoryLayout:
    """The order of a tensor's elements in memory, as a matrix of blocks and back.

    Args:
        tensor: [...], of any strides. A tensor with gaps in memory is restored without them.
        block_size: the number of elements that share a scale.
    """

    __slots__ = ("columns", "dtype", "is_dense", "order", "shape")

    def __init__(self, tensor: Tensor, block_size: int) -> None:
        strides = tensor.stride()
        self.order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        self.shape = [tensor.shape[dim] for dim in self.order]
        self.dtype = tensor.dtype
        self.is_dense = tensor.numel() == 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
        has_whole_blocks = tensor.numel() % block_size == 0
        self.columns = block_size if has_whole_blocks else self.shape[-1]

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return the elements in memory order, [rows, columns]; a view if the tensor is dense."""
        return tensor.permute(self.order).reshape(-1, self.columns)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo `to_matrix`: return a tensor with the original shape and order of strides."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view(self.shape).permute(inverse)


def quantize_activation(matrix: Tensor, block_size: int) -> Operand:
    """Quantize to float8_e4m3fn codes [rows, columns] with float32 scales [rows, ceil(columns / block_size)]."""
    cast = BlockCast(E4M3.dtype, row=True, column=False, power_of_2=True, dot_products=1, length=block_size, rule="")
    return require(cast_blockwise(matrix, *cast).row, "the row operand")


def _dequantize_activation(codes: Tensor, scale: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantize the codes and scales of `quantize_activation` to `dtype`.

    Raises:
        ValueError: a scale of another shape.
    """
    _, columns = _check_scale(codes, scale, layout).get_block_shape(codes.shape)
    wide_dtype = torch.float32 if dtype is torch.float16 else dtype
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(columns, dim=1)[:, : codes.shape[1]]
    return (codes.to(wide_dtype) * scale.to(wide_dtype)).to(dtype)


def _dequantize_activation_cpu(codes: Tensor, scale: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    scale_layout = _check_scale(codes, scale, layout)
    return widen(codes, torch.float32 if dtype is torch.float16 else dtype, scale, scale_layout).to(dtype)


def _check_scale(codes: Tensor, scale: Tensor, layout: Sequence[int]) -> ScaleLayout:
    scale_layout = ScaleLayout(*layout)
    if codes.dim() != 2 or scale.shape != scale_layout.get_scale_shape(codes.shape[0], codes.shape[1]):
        raise ValueError(f"expected a {scale_layout} scale for codes {list(codes.shape)}, got {list(scale.shape)}")
    return scale_layout


dequantize_activation = register_operation(_dequantize_activation, results=1, cpu=_dequantize_activation_cpu)


def dequantize_in_graph(codes: Tensor, scale: Tensor, layout: ScaleLayout, dtype: torch.dtype) -> Tensor:
    """Dequantize a stored activation in a compiled graph.

    On a GPU this runs PyTorch ops, which Inductor fuses into the ops that read the result.
    """
    return (dequantize_activation if is_cpu(codes) else _dequantize_activation)(codes, scale, layout, dtype)
