"""Native float8 matmuls with block scales, and the layouts of scales that they read.

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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType as TorchScalingType
from torch.nn.functional import SwizzleType
from torch.utils.flop_counter import register_flop_formula

from quaver.kernels.cast import to_row_major
from quaver.kernels.exact_mm import count_flops
from quaver.kernels.operation import register_operation

ALIGNMENT = 16
"""K and N of a native float8 matmul must be multiples of this."""
_ROWS_OF_TILE, _BLOCKS_OF_TILE = 128, 4


def _native_block_mm(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, length: int, is_square: bool
) -> Tensor:
    """a [M, K] @ b [K, N], both e4m3 with block scales, -> bfloat16 [M, N]. `is_square`: b has square blocks.

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
    """Append `rows` rows of 1, column-major. Without rows it copies nothing if `has_scales_by_columns` held."""
    by_columns = scale.t()
    return (F.pad(by_columns, (0, rows), value=1.0) if rows else by_columns.contiguous()).t()


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
