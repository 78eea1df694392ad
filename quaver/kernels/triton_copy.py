"""A transposing copy of float8 codes on NVIDIA GPUs, in Triton: 2 bytes moved per element.

PyTorch copies bytes across strides at a sixth to a tenth of a GPU's bandwidth (pytorch/pytorch#113560): 1.98 ms on an
H100 for 32768 x 8192. This kernel loads and stores 16 bytes at a time. triton_blocks.py describes the grid, the tile
and the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quaver.kernels.triton_blocks import (
    FLOAT8_DTYPES,
    MAX_MATRICES,
    KernelTile,
    jit,
    launch,
    load_tile,
    store_column_codes,
    supports_tensor,
)

try:
    import triton.language as tl
except ImportError:  # PyTorch for CPUs lacks it
    tl = None


def supports_codes(codes: Tensor) -> bool:
    """Return whether the kernel copies `codes` [..., R, C], which must be float8 and pass `supports_tensor`."""
    is_matrices = codes.dim() >= 2 and math.prod(codes.shape[:-2]) <= MAX_MATRICES
    return codes.dtype in FLOAT8_DTYPES and is_matrices and supports_tensor(codes)


def to_column_major(codes: Tensor) -> Tensor | None:
    """Copy `codes` [..., R, C] so that each matrix has strides (1, R); None for codes that it does not support."""
    if not supports_codes(codes):
        return None
    height, width = codes.shape[-2:]
    copy = codes.new_empty(codes.mT.shape)
    is_aligned = height % 16 == width % 16 == codes.data_ptr() % 16 == 0
    tile = (
        KernelTile(128, 128, warps=4, rows_of_thread=8)
        if is_aligned
        else KernelTile(64, 32, warps=4, rows_of_thread=16)
    )
    launch(_column_major, codes.view(torch.uint8), tile, copy.view(torch.uint8))
    return copy.mT


@jit
def _column_major(
    codes_ptr: tl.tensor, copy_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> None:
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64) * rows * columns
    codes, _, c = load_tile(codes_ptr + matrix, tile, rows, columns, TILE)
    store_column_codes(copy_ptr + matrix, codes, tile, c, rows, columns, TILE)
