"""Grouped matmuls by torch's grouped kernels for GPUs: prepares the layouts, padding and scales of the operands.

    multiply_scaled     torch._scaled_grouped_mm: e4m3 with scales of rows and columns
    multiply_widened    torch._grouped_mm: bfloat16 operands, or codes times scales that are powers of two

Both multiply rows [T, contracted] by weights [E, contracted, columns]. For grad_weight they multiply [X, T] by [T, Y],
and the groups lie along the contracted dim. Every dim, and each group along the contracted dim, is padded with zeros to
a multiple of 16. The results are bfloat16.

The first kernel needs operands that are contiguous along the contracted dim, the second supports either dim, so only
codes are transposed in memory. Matrices must start at a multiple of 16 bytes (aten/src/ATen/native/GroupedMMUtils.h).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.experts.groups import ExpertMatmul, expand_row_scales, find_groups
from quaver.kernels.cast import to_row_major
from quaver.kernels.native_mm import ALIGNMENT
from quaver.kernels.operands import Operand, require
from quaver.kernels.widen import widen
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import ALL
from quaver.torch_private.hardware import grouped_mm, scaled_grouped_mm

GROUPED_MM_CAPABILITIES = (9, 10)
"""The major compute capabilities for which torch has kernels of both: `_grouped_mm_cuda` and `_scaled_grouped_mm_cuda`,
GroupedBlas.cpp."""


class _GroupScales(NamedTuple):
    """The scales of a matrix in groups. Tensorwise scales set both fields, scales of blocks neither."""

    row_scales: Tensor | None
    """float32 [rows], if each row has one scale."""
    column_scales: Tensor | None
    """float32 [E, columns], if each column of a group has one scale."""


def multiply_scaled(
    a: Operand, b: Operand, ends: Tensor, matmul: ExpertMatmul, transposed: bool, *, use_fast_accum: bool
) -> Tensor | None:
    """Run a grouped matmul in float8. Returns None if a scale varies along the contracted dim, and for e5m2."""
    if a.data.dtype is not E4M3.dtype or b.data.dtype is not E4M3.dtype:
        return None
    a_scales = _split_scales(a, ends, ends.shape[0])
    b_scales = _split_scales(b, _select_b_ends(ends, matmul), ends.shape[0])
    if matmul is ExpertMatmul.GRAD_WEIGHT:
        scales = [a_scales.column_scales, b_scales.column_scales]
    else:
        scales = [a_scales.row_scales, b_scales.row_scales if matmul.reads_rows(transposed) else b_scales.column_scales]
    if any(scale is None for scale in scales):
        return None
    return _multiply_natively(a.data, b.data, scales, ends, matmul, transposed, use_fast_accum=use_fast_accum)


def multiply_widened(a: Operand, b: Operand, ends: Tensor, matmul: ExpertMatmul, transposed: bool) -> Tensor:
    """Run a grouped matmul in bfloat16. The scales of codes must be powers of two."""
    wide = _widen(a, ends, ends.shape[0]), _widen(b, _select_b_ends(ends, matmul), ends.shape[0])
    return _multiply_natively(*wide, None, ends, matmul, transposed, use_fast_accum=False)


def _select_b_ends(ends: Tensor, matmul: ExpertMatmul) -> Tensor | None:
    """Return the ends of the groups in b: in GRAD_WEIGHT b is tokens, else a stack of weights."""
    return ends if matmul is ExpertMatmul.GRAD_WEIGHT else None


def _split_scales(operand: Operand, ends: Tensor | None, num_groups: int) -> _GroupScales:
    (rows, columns), scale = operand.data.shape, require(operand.dequant_scale, "the dequant_scale")
    if scale.dim() == 1:
        group = find_groups(ends, num_groups, rows, scale.device)[0]
        return _GroupScales(F.pad(scale, (0, 1))[group], scale[:, None].expand(num_groups, columns))
    if operand.layout.rows == 1 and scale.shape[1] == 1:
        return _GroupScales(scale.view(-1), None)
    return _GroupScales(None, scale if operand.layout.rows == ALL and scale.shape == (num_groups, columns) else None)


def _widen(operand: Operand, ends: Tensor | None, num_groups: int) -> Tensor:
    if operand.dequant_scale is None:
        return operand.data.to(torch.bfloat16)
    return widen(operand.data, torch.bfloat16, *expand_row_scales(operand, ends, num_groups))  # 0 or NaN outside groups


def _multiply_natively(
    a: Tensor,
    b: Tensor,
    scales: list[Tensor | None] | None,
    ends: Tensor,
    matmul: ExpertMatmul,
    transposed: bool,
    *,
    use_fast_accum: bool,
) -> Tensor:
    num_groups = ends.shape[0]
    a_scale, b_scale = (None, None) if scales is None else scales
    if matmul is ExpertMatmul.GRAD_WEIGHT:
        if transposed:  # [E, K, N] = b.t() @ a
            a, b, a_scale, b_scale = b, a, b_scale, a_scale
        sizes = a.shape[1], b.shape[1]
        target_rows, padded_ends, rows = _find_padded_rows(ends, a.shape[0])
        left, right = (_lay_out_contracted(_scatter_rows(_pad(side), target_rows, rows).t()) for side in (a, b))
        if a_scale is not None and b_scale is not None:
            a_scale, b_scale = (_pad(scale, 1.0).reshape(-1) for scale in (a_scale, b_scale))
        out = _run_kernel(left, right.t(), a_scale, b_scale, padded_ends, use_fast_accum)[:, : sizes[0], : sizes[1]]
        return out.masked_fill((torch.diff(ends, prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    weights = b.view(num_groups, -1, b.shape[1])
    if not matmul.reads_rows(transposed):
        weights = weights.transpose(1, 2)
    columns = weights.shape[1]  # weights is [E, columns of the result, contracted]
    right = _lay_out_contracted(_pad(_pad(weights).transpose(1, 2)).transpose(1, 2))
    if b_scale is not None:
        b_scale = _pad(b_scale.reshape(num_groups, columns), 1.0)
    out = _run_kernel(_pad(a).contiguous(), right.transpose(1, 2), a_scale, b_scale, ends, use_fast_accum)[:, :columns]
    is_outside = torch.arange(a.shape[0], device=a.device) >= ends[-1]
    return out.masked_fill(is_outside[:, None], 0)


def _run_kernel(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, ends: Tensor, use_fast_accum: bool
) -> Tensor:
    a, b = (side.clone() if side.data_ptr() % ALIGNMENT else side for side in (a, b))
    if a_scale is None or b_scale is None:
        return grouped_mm(a, b, offs=ends)
    return scaled_grouped_mm(
        a,
        b,
        a_scale.contiguous(),
        b_scale.contiguous(),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )


def _lay_out_contracted(matrices: Tensor) -> Tensor:
    """Return [..., contracted] in a layout that the matmul of this dtype supports."""
    return to_row_major(matrices) if matrices.dtype is E4M3.dtype else matrices


def _pad(tensor: Tensor, value: float = 0.0) -> Tensor:
    """Pad the last dim to a multiple of 16."""
    missing = -tensor.shape[-1] % ALIGNMENT
    if tensor.dtype is E4M3.dtype:
        return F.pad(tensor.view(torch.uint8), (0, missing)).view(tensor.dtype) if missing else tensor
    return F.pad(tensor, (0, missing), value=value) if missing else tensor


def _find_padded_rows(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Find where rows lie after each group is padded to a multiple of 16 rows.

    Returns each row's padded row, int64 [rows], the ends of the padded groups, and an upper bound of their rows, which
    is also the padded row of rows outside every group.
    """
    num_groups = ends.shape[0]
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    padded_ends = torch.cumsum((lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 0, dtype=torch.int32)
    group, starts = find_groups(ends, num_groups, rows, ends.device)
    total = -(-(rows + num_groups * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
    shift = F.pad(padded_ends[:-1], (1, 0)) - starts
    target_rows = torch.arange(rows, device=ends.device) + F.pad(shift, (0, 1))[group]
    return target_rows.where(group < num_groups, total), padded_ends, total


def _scatter_rows(data: Tensor, target_rows: Tensor, rows: int) -> Tensor:
    """Copy the rows of `data` [T, columns] to the rows `target_rows` of zeros [rows, columns]."""
    bits = data.view(torch.uint8) if data.dtype is E4M3.dtype else data
    scattered = bits.new_zeros(rows + 1, bits.shape[1]).index_copy_(0, target_rows, bits)
    return scattered[:rows].view(data.dtype)
