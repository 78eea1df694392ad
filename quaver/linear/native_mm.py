"""The hardware's float8 matmul, and the kinds of scales that it supports.

`prepare_native_operands` prepares operands for Hopper's native matmul, which requires:

    both operands contiguous along the contracted dim
    K and N that are multiples of 16 (`pad_operands` appends zeros)
    with rowwise scales, a bfloat16 result and a scale for every row of a and every column of b

native_blocks.py prepares operands with block scales.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.cast import to_row_major
from quaver.kernels.native_blocks import ALIGNMENT, native_block_mm, pad_codes
from quaver.kernels.operands import Operand, require
from quaver.recipes.formats import E5M2
from quaver.recipes.scale_layout import ScaleLayout
from quaver.torch_private.hardware import scaled_mm


class ScaleKind(enum.Enum):
    """The layouts of scales that hardware distinguishes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKS_OF_128 = "1 x 128"
    BLOCKS_OF_32 = "1 x 32"
    GROUPS = "rowwise grouped"

    @property
    def block_length(self) -> int:
        """The length of a block along the contracted dim; 0 if the scales have no blocks."""
        return next((length for length, kind in _KIND_OF_BLOCK_LENGTH.items() if kind is self), 0)


_KIND_OF_BLOCK_LENGTH = {128: ScaleKind.BLOCKS_OF_128, 32: ScaleKind.BLOCKS_OF_32}


def find_kind(a: Operand, b: Operand) -> ScaleKind | None:
    """Return the kind of the scales of a [M, K] and b [K, N], or None if no hardware supports them."""
    if a.varies_along(1) or b.varies_along(0):
        kind = find_block_kind(a.layout, b.layout)
        return None if E5M2.dtype in (a.data.dtype, b.data.dtype) else kind
    return ScaleKind.TENSORWISE if a.layout.is_tensorwise and b.layout.is_tensorwise else ScaleKind.ROWWISE


def find_block_kind(a: ScaleLayout, b: ScaleLayout) -> ScaleKind | None:
    """Return the kind of a [M, K] in blocks of 1 x n and b [K, N] in blocks of n x 1 or n x n, else None."""
    length = a.columns
    return _KIND_OF_BLOCK_LENGTH.get(length) if a.rows == 1 and b.rows == length and b.columns in (1, length) else None


def prepare_native_operands(a: Operand, b: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of a and b, then their scales, for the hardware.

    K and N are padded to multiples of 16, codes are contiguous along K, and both scales have one kind.
    """
    a, b = pad_operands(a, b)
    a_codes, b_codes = to_row_major(a.data), to_row_major(b.data.t()).t()
    a_scale, b_scale = require(a.dequant_scale, "the dequant_scale"), require(b.dequant_scale, "the dequant_scale")
    if not (a.layout.is_tensorwise and b.layout.is_tensorwise):
        a_scale = a_scale.expand(a_codes.shape[0], 1).contiguous()
        b_scale = b_scale.expand(1, b_codes.shape[1]).contiguous()
    return a_codes, b_codes, _align_scale(a_scale), _align_scale(b_scale)


def _align_scale(scale: Tensor) -> Tensor:
    """Copy `scale` unless it starts at a multiple of 16 bytes, as cuBLAS requires.

    Scales of experts and of FSDP2 are slices of one tensor. Dynamo does not trace storage_offset; compiled code
    multiplies experts in an operation, which calls this in eager mode.
    """
    return scale if torch.compiler.is_compiling() or scale.storage_offset() % 4 == 0 else scale.clone()


def native_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """Multiply a [M, K] and b [K, N] on float8 units: [M, N] in `out_dtype`, plus bias [N]."""
    rows, columns = a.data.shape[0], b.data.shape[1]
    kind = find_kind(a, b)
    if kind is not None and kind.block_length:
        tensors, is_square = (a.data, b.data, a.dequant_scale, b.dequant_scale), b.layout.rows == b.layout.columns
        product = native_block_mm(*tensors, kind.block_length, is_square)
        return _unpad(product, rows, columns, bias, out_dtype)
    a_codes, b_codes, a_scale, b_scale = prepare_native_operands(a, b)
    native_dtype = torch.bfloat16 if a_scale.dim() else out_dtype
    bias_inside = bias is not None and bias.dtype is native_dtype is torch.bfloat16 and b_codes.shape[1] == columns
    out = scaled_mm(
        a_codes,
        b_codes,
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias if bias_inside else None,
        out_dtype=native_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _unpad(out, rows, columns, None if bias_inside else bias, out_dtype)


def _unpad(out: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Remove the padding, add the bias and convert to `out_dtype`."""
    if out.shape != (rows, columns):
        out = out[:rows, :columns].clone(memory_format=torch.contiguous_format)  # autograd.Functions return no views
    out = out if bias is None else out + bias
    # `to` must not return its argument: Dynamo in torch 2.11 would make the gradients of the autograd.Function zeros.
    return out if out.dtype is out_dtype else out.to(out_dtype)


def pad_operands(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Pad K and N of a [M, K] and b [K, N] with zeros to multiples of 16."""
    k, n = -a.size[1] % ALIGNMENT, -b.size[1] % ALIGNMENT
    return _append_zeros(a, 0, k), _append_zeros(b, k, n)


def _append_zeros(operand: Operand, rows: int, columns: int) -> Operand:
    """Append this many rows and columns of zeros. New blocks have a scale of 1."""
    codes, scale, layout, _, outer_scale = operand
    padded = pad_codes(codes, rows // layout.rows_of_byte, columns // layout.columns_of_byte)
    if scale is not None and not layout.is_tensorwise:
        down, across = layout.get_scale_shape(*layout.get_matrix_size(padded))
        padding = (0, across - scale.shape[1], 0, down - scale.shape[0])
        scale = F.pad(scale, padding, value=1.0) if any(padding) else scale
    return Operand(padded, scale, layout, None, outer_scale)
