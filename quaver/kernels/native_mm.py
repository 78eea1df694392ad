"""The hardware's float8 matmul, and the kinds of scales that it supports.

`prepare_native_operands` prepares operands with a scale per tensor or per row for Hopper's matmul, which requires:

    both operands contiguous along the contracted dim
    K and N that are multiples of 16 (`pad_operands` appends zeros)
    with rowwise scales, a bfloat16 result and a scale for every row of a and every column of b

`native_block_mm` multiplies operands with block scales:

    length   device                           a         b                       scales
    128      Hopper, cublasLt 12.9 or later   1 x 128   128 x 128 or 128 x 1    float32, column-major
    32       Blackwell                        1 x 32    32 x 32 or 32 x 1       E8M0, in tiles of 128 x 4

Lengths are along the contracted dim, along which a GPU's codes are contiguous. The last blocks are padded with zeros.
Square blocks of 32 are expanded to 32 rows of one scale. torch.nn.functional.scaled_mm computes a bfloat16 result. A
compiler sees one operation, because torch 2.13's Inductor rejects tiled scales and drops the strides of scales of 128.

A tile holds the scales of 128 rows and 4 blocks, row r and block c at byte 16 (r % 32) + 4 (r // 32) + c. Tiles follow
each other along K, then along rows.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType as TorchScalingType
from torch.nn.functional import SwizzleType
from torch.utils.flop_counter import register_flop_formula

from quaver.kernels.cast import to_row_major
from quaver.kernels.exact_mm import count_flops
from quaver.kernels.operands import Operand, require
from quaver.kernels.operation import register_operation
from quaver.recipes.formats import E5M2
from quaver.recipes.scale_layout import ScaleLayout
from quaver.torch_private.hardware import scaled_mm

ALIGNMENT = 16
"""K and N of a native float8 matmul must be multiples of this."""
_ROWS_OF_TILE, _BLOCKS_OF_TILE = 128, 4


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


def find_scale_kind(a: Operand, b: Operand) -> ScaleKind | None:
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
    kind = find_scale_kind(a, b)
    if kind is not None and kind.block_length:
        tensors, is_square = (a.data, b.data, a.dequant_scale, b.dequant_scale), b.layout.rows == b.layout.columns
        product = native_block_mm(*tensors, kind.block_length, is_square)
        return _unpad(product, rows, columns, bias, out_dtype)
    a_codes, b_codes, a_scale, b_scale = prepare_native_operands(a, b)
    native_dtype = torch.bfloat16 if a_scale.dim() else out_dtype
    fuses_bias = bias is not None and bias.dtype is native_dtype is torch.bfloat16 and b_codes.shape[1] == columns
    out = scaled_mm(
        a_codes,
        b_codes,
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias if fuses_bias else None,
        out_dtype=native_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _unpad(out, rows, columns, None if fuses_bias else bias, out_dtype)


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


def _native_block_mm(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, length: int, is_square: bool
) -> Tensor:
    """Multiply a [M, K] @ b [K, N], both e4m3 with block scales, to bfloat16 [M, N]. `is_square`: b has square blocks.

    cuBLAS reads each column of 1 x 128 scales at a multiple of 16 bytes, so rows are padded too.
    """
    (m, k), n = a.shape, b.shape[1]
    missing_rows, missing_columns = -m % ALIGNMENT, -n % (length if is_square else ALIGNMENT)
    a = to_row_major(pad_codes(a, missing_rows, -k % length))
    b = to_row_major(pad_codes(b, -k % length, missing_columns).t()).t()
    if length == 128:
        # Square blocks: scales have a row per block of K, padded to a multiple of 4. Others: a row per column of b.
        missing_scales = -b_dequant_scale.shape[0] % 4 if is_square else missing_columns
        b_scale = b_dequant_scale if is_square else b_dequant_scale.t()
        scales = _pad_to_column_major(a_dequant_scale, missing_rows), _pad_to_column_major(b_scale, missing_scales)
        recipes = (
            TorchScalingType.BlockWise1x128,
            TorchScalingType.BlockWise128x128 if is_square else TorchScalingType.BlockWise1x128,
        )
        swizzle = SwizzleType.NO_SWIZZLE
    else:
        column_scales = b_dequant_scale.repeat_interleave(length, 1) if is_square else b_dequant_scale
        scales = _tile_scales(a_dequant_scale), _tile_scales(column_scales.t())
        recipes = TorchScalingType.BlockWise1x32, TorchScalingType.BlockWise1x32
        swizzle = SwizzleType.SWIZZLE_32_4_4
    out = F.scaled_mm(a, b, scales[0], recipes[0], scales[1], recipes[1], swizzle, swizzle)
    return out if out.shape == (m, n) else out[:m, :n].clone(memory_format=torch.contiguous_format)


def _pad_to_column_major(scale: Tensor, rows: int) -> Tensor:
    """Append `rows` rows of 1, column-major. Without rows it copies nothing if `has_column_major_scales` held."""
    transposed = scale.t()
    return (F.pad(transposed, (0, rows), value=1.0) if rows else transposed.contiguous()).t()


def _tile_scales(scale: Tensor) -> Tensor:
    """Convert float32 powers of two [rows, blocks] to a flat tensor of E8M0 tiles."""
    missing_rows, missing_blocks = -scale.shape[0] % _ROWS_OF_TILE, -scale.shape[1] % _BLOCKS_OF_TILE
    padding = 0, missing_blocks, 0, missing_rows
    padded = F.pad(scale, padding, value=1.0) if any(padding) else scale
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // _BLOCKS_OF_TILE, _BLOCKS_OF_TILE).permute(0, 3, 2, 1, 4)
    return tiles.to(torch.float8_e8m0fnu, memory_format=torch.contiguous_format).view(-1)


def pad_codes(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Append zeros (code 0 in every format) and keep the layout of the codes."""
    if not (rows or columns):
        return codes
    if not codes.is_contiguous() and codes.t().is_contiguous():
        return pad_codes(codes.t(), columns, rows).t()
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def _mm_fake(a: Tensor, b: Tensor, *_: object) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


native_block_mm = register_operation(_native_block_mm, results=1, fake=_mm_fake, in_graphs=True)
register_flop_formula(torch.ops.quaver.native_block_mm)(count_flops)
