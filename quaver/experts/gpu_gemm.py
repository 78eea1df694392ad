"""Grouped matmuls by torch's grouped kernels for GPUs, which read no sizes on the host: layouts, padding, scales.

    scaled     torch._scaled_grouped_mm: e4m3 with scales of rows and columns; Hopper
    widened    torch._grouped_mm: bfloat16, of operands in high precision, or of codes times powers of two

Both multiply rows [T, contracted] with weights [E, contracted, columns], and for grad_weight [X, T] with [T, Y], where
the groups lie along the contracted dim. Zeros complete every dim, and each group along the contracted one, to a
multiple of 16. The results are bfloat16.

The first reads both operands along the contracted dim, the second along either dim, so only codes are transposed in
memory. Both want matrices that start at a multiple of 16 bytes (aten/src/ATen/native/GroupedMMUtils.h).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.experts.groups import Form, group_of_rows, scales_of_rows
from quaver.kernels.cast import row_major
from quaver.kernels.native_blocks import ALIGNMENT
from quaver.kernels.operands import Operand, expect
from quaver.kernels.widen import widen
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import ALL
from quaver.torch_private.hardware import grouped_mm, scaled_grouped_mm

GROUPED_ON = (9, 10)
"""The major compute capabilities that torch's grouped matmuls have kernels for: `_grouped_mm_cuda`, GroupedBlas.cpp."""


class _Factor(NamedTuple):
    """The scales of a matrix in groups, as far as they do not vary along one of its dims."""

    of_rows: Tensor | None
    """float32 [rows], where each row has a scale;"""
    of_columns: Tensor | None
    """float32 [E, columns], where each column of a group has one; both of a tensorwise scale."""


def scaled(a: Operand, b: Operand, ends: Tensor, form: Form, transposed: bool, use_fast_accum: bool) -> Tensor | None:
    """The grouped matmul of gemm.py in float8; None where a scale varies along the contracted dim, and for e5m2."""
    if a.data.dtype is not E4M3.dtype or b.data.dtype is not E4M3.dtype:
        return None
    factors = _factor(a, ends, ends.shape[0]), _factor(b, _ends_of_b(ends, form), ends.shape[0])
    by_rows = (form is Form.OUTPUT) is not transposed
    if form is Form.GRAD_WEIGHT:
        scales = [each.of_columns for each in factors]
    else:
        scales = [factors[0].of_rows, factors[1].of_rows if by_rows else factors[1].of_columns]
    if any(scale is None for scale in scales):
        return None
    return _multiply(a.data, b.data, scales, ends, form, transposed, use_fast_accum)


def widened(a: Operand, b: Operand, ends: Tensor, form: Form, transposed: bool) -> Tensor:
    """The grouped matmul of gemm.py in bfloat16. The scales of codes are powers of two."""
    wide = _widened(a, ends, ends.shape[0]), _widened(b, _ends_of_b(ends, form), ends.shape[0])
    return _multiply(*wide, None, ends, form, transposed, False)


def _ends_of_b(ends: Tensor, form: Form) -> Tensor | None:
    """The ends of the groups in b: those of tokens in GRAD_WEIGHT, else None, for b is a stack of weights."""
    return ends if form is Form.GRAD_WEIGHT else None


def _factor(operand: Operand, ends: Tensor | None, groups: int) -> _Factor:
    (rows, columns), scale = operand.data.shape, expect(operand.dequant_scale)
    if scale.dim() == 1:
        group = group_of_rows(ends, groups, rows, scale.device)[0]
        return _Factor(F.pad(scale, (0, 1))[group], scale[:, None].expand(groups, columns))
    if operand.layout.rows == 1 and scale.shape[1] == 1:
        return _Factor(scale.view(-1), None)
    return _Factor(None, scale if operand.layout.rows == ALL and scale.shape == (groups, columns) else None)


def _widened(operand: Operand, ends: Tensor | None, groups: int) -> Tensor:
    """In bfloat16, times the scales."""
    if operand.dequant_scale is None:
        return operand.data.to(torch.bfloat16)
    return widen(operand.data, torch.bfloat16, *scales_of_rows(operand, ends, groups))  # rows of no group: 0, or NaN


def _multiply(
    a: Tensor,
    b: Tensor,
    scales: list[Tensor | None] | None,
    ends: Tensor,
    form: Form,
    transposed: bool,
    use_fast_accum: bool,
) -> Tensor:
    groups = ends.shape[0]
    a_scale, b_scale = (None, None) if scales is None else scales
    if form is Form.GRAD_WEIGHT:
        if transposed:  # [E, K, N] = b.t() @ a
            a, b, a_scale, b_scale = b, a, b_scale, a_scale
        sizes = a.shape[1], b.shape[1]
        to, padded_ends, rows = _padded_rows(ends, a.shape[0])
        left, right = (_along_contracted(_moved(_padded(each), to, rows).t()) for each in (a, b))
        if a_scale is not None and b_scale is not None:
            a_scale, b_scale = (_padded(each, 1.0).reshape(-1) for each in (a_scale, b_scale))
        out = _call(left, right.t(), a_scale, b_scale, padded_ends, use_fast_accum)[:, : sizes[0], : sizes[1]]
        return out.masked_fill((torch.diff(ends, prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    by_rows = (form is Form.OUTPUT) is not transposed
    weights = b.view(groups, -1, b.shape[1])
    weights = weights if by_rows else weights.transpose(1, 2)  # [E, columns of the result, contracted]
    columns = weights.shape[1]
    right = _along_contracted(_padded(_padded(weights).transpose(1, 2)).transpose(1, 2))
    if b_scale is not None:
        b_scale = _padded(b_scale.reshape(groups, columns), 1.0)
    out = _call(_padded(a).contiguous(), right.transpose(1, 2), a_scale, b_scale, ends, use_fast_accum)[:, :columns]
    past = torch.arange(a.shape[0], device=a.device) >= ends[-1]
    return out.masked_fill(past[:, None], 0)


def _call(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, ends: Tensor, use_fast_accum: bool
) -> Tensor:
    a, b = (each.clone() if each.data_ptr() % ALIGNMENT else each for each in (a, b))
    if a_scale is None or b_scale is None:
        product: Tensor = grouped_mm(a, b, offs=ends)
        return product
    scaled_product: Tensor = scaled_grouped_mm(
        a,
        b,
        a_scale.contiguous(),
        b_scale.contiguous(),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    return scaled_product


def _along_contracted(matrices: Tensor) -> Tensor:
    """[..., contracted], in a layout that the matmul of this dtype reads."""
    return row_major(matrices) if matrices.dtype is E4M3.dtype else matrices


def _padded(tensor: Tensor, value: float = 0.0) -> Tensor:
    """The last dim completed to a multiple of 16."""
    missing = -tensor.shape[-1] % ALIGNMENT
    if tensor.dtype is E4M3.dtype:
        return F.pad(tensor.view(torch.uint8), (0, missing)).view(tensor.dtype) if missing else tensor
    return F.pad(tensor, (0, missing), value=value) if missing else tensor


def _padded_rows(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where rows go if each group takes a multiple of 16 rows: int64 [rows], the new ends, and how many rows there are.

    Rows of no group go to a last row, which no group has.
    """
    groups = ends.shape[0]
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    padded_ends = torch.cumsum((lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 0, dtype=torch.int32)
    group, starts = group_of_rows(ends, groups, rows, ends.device)
    total = -(-(rows + groups * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
    shift = F.pad(padded_ends[:-1], (1, 0)) - starts
    to = torch.arange(rows, device=ends.device) + F.pad(shift, (0, 1))[group]
    return to.where(group < groups, total), padded_ends, total


def _moved(data: Tensor, to: Tensor, rows: int) -> Tensor:
    """`data` [T, columns] with its rows at `to`, between zeros: [rows, columns]."""
    bits = data.view(torch.uint8) if data.dtype is E4M3.dtype else data
    moved = bits.new_zeros(rows + 1, bits.shape[1]).index_copy_(0, to, bits)
    return moved[:rows].view(data.dtype)
