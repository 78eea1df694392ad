"""Casts to float8 of a matrix whose rows belong to groups (groups.py), which are scaled separately.

On a CPU each group is cast by the table of casts (kernels/cast.py). Elsewhere PyTorch casts all groups at once, without
synchronizing with the host; on a GPU a Triton kernel reduces the amaxes of columns by group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.experts.groups import (
    count_scale_rows,
    find_first_scale_row,
    find_group_bounds,
    find_scale_rows,
    get_cast_layout,
    get_scale_shape,
)
from quaver.kernels import cpu
from quaver.kernels.cast import CAST_PHASE, CASTS, realize_scales
from quaver.kernels.operands import Operand, Operands, cast_by_layout, require, select_directions
from quaver.kernels.operation import register_operation
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, ScalingGranularity
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scale_rules import has_cast_kernel, report_missing_kernel


class GroupCast(NamedTuple):
    """The arguments of the operation `cast_groups` after the matrix."""

    float8_dtype: torch.dtype
    ends: Tensor | None
    num_groups: int
    """`ends` and `num_groups`: see groups.py."""
    row: bool
    column: bool
    power_of_2: bool
    granularity: str
    """A value of `ScalingGranularity`."""
    dot_products: int
    length: int
    """`dot_products` and `length`: with "blockwise" as in `cast_blockwise`, else 0."""
    rule: str

    @property
    def row_layout(self) -> ScaleLayout:
        """The layout of row codes."""
        return get_cast_layout(self.granularity, self.dot_products, self.length)


def _cast_groups(hp: Tensor, cast: GroupCast) -> Operands:
    """Quantize groups of rows for one or both of their matmuls. groups.py has the shapes of the scales."""
    float8_dtype, ends, num_groups, row, column, power_of_2, granularity, _, _, rule = cast
    cpu.check_memory(hp, ends)
    report_missing_kernel(rule)
    is_blockwise = granularity == ScalingGranularity.BLOCKWISE.value
    row_layout = cast.row_layout

    def quantize(layout: ScaleLayout) -> Operand:
        rows, columns = layout.rows, layout.columns
        num_scale_rows = count_scale_rows(rows, num_groups, hp.shape[0])
        scale_row = find_scale_rows(ends, num_groups, hp.shape[0], rows, hp.device)
        amax = _compute_amaxes(hp, ends, num_groups, layout, scale_row)
        amax = amax.to(hp.dtype) if rule else amax  # exact; see `compute_scales`
        scales = scaling.compute_scales(amax, float8_dtype, power_of_2, rule, is_blockwise=is_blockwise)
        scales = realize_scales(scales)
        quant, dequant, _ = scales
        factor = scaling.choose_factor(scales, rule)
        shape = get_scale_shape(layout, num_groups, *hp.shape)
        row_scales, layout_in_row = expand_quant_scales(hp, factor, scale_row, columns)
        if column and not (row and layout == row_layout) and torch.compiler.is_dynamo_compiling():
            # The transpose shares no node with row codes, so the backward can recompute it (kernels/cast.py).
            arguments = hp.t(), row_scales.t(), float8_dtype, layout_in_row.t()
            codes = scaling.cast_blocks(*arguments, is_own_scale=True, rule=rule).t().contiguous()
        else:
            codes = scaling.cast_blocks(hp, row_scales, float8_dtype, layout_in_row, is_own_scale=True, rule=rule)
        return Operand(codes, dequant[:num_scale_rows].view(shape), layout, quant[:num_scale_rows].view(shape))

    return cast_by_layout(quantize, row, column, row_layout)


def _make_row_blocks(hp: Tensor, columns: int) -> ScaleLayout:
    """Return the layout with blocks of one row and `columns` columns (or `ALL`), as a number."""
    return ScaleLayout(*ScaleLayout(1, columns).get_block_shape(hp.shape))


def _compute_amaxes(hp: Tensor, ends: Tensor | None, num_groups: int, layout: ScaleLayout, scale_row: Tensor) -> Tensor:
    """Run `compute_scale_row_amax`, without a scatter if all scales have equal numbers of rows."""
    rows, columns = layout.rows, layout.columns
    has_equal_groups = rows == ALL and ends is None and hp.shape[0] > 0
    if rows != 1 and not has_equal_groups:
        return compute_scale_row_amax(hp, scale_row, count_scale_rows(rows, num_groups, hp.shape[0]), columns)
    amax = scaling.compute_block_amax(hp, _make_row_blocks(hp, columns)).float()
    amax = amax.view(num_groups, -1, amax.shape[1]).amax(1) if has_equal_groups else amax
    return F.pad(amax, (0, 0, 0, 1))


def compute_scale_row_amax(hp: Tensor, scale_row: Tensor, count: int, columns: int) -> Tensor:
    """Return the amax for each row of scales, float32 [count + 1, blocks of columns].

    The last row is for rows outside every group.
    """
    if columns == 1:
        return group_amax(hp, scale_row, count + 1)
    return _reduce_by_group(scale_row, count + 1, scaling.compute_block_amax(hp, _make_row_blocks(hp, columns)))


def _group_amax(hp: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the amax of each column of `hp` [R, C] in each group, float32 [num_groups, C]; `group` is int64 [R]."""
    return _reduce_by_group(group, num_groups, scaling.compute_block_amax(hp, ScaleLayout(1, 1)))


def _group_amax_fake(hp: Tensor, group: Tensor, num_groups: int) -> Tensor:
    scaling.check_hp(hp)
    return hp.new_empty(num_groups, hp.shape[1], dtype=torch.float32)


# An operation, because Inductor would scatter: it writes the magnitudes as int32, with an atomic for each element.
group_amax = register_operation(
    _group_amax, results=1, gpu="group_amax", fake=_group_amax_fake, in_graphs=True, phase=CAST_PHASE
)


def _reduce_by_group(group: Tensor, num_groups: int, magnitudes: Tensor) -> Tensor:
    bits = magnitudes.float().view(torch.int32)  # bits order as magnitudes do, with NaN the largest
    largest = bits.new_zeros(num_groups, bits.shape[1])
    return largest.scatter_reduce(0, group[:, None].expand(bits.shape), bits, "amax").view(torch.float32)


def expand_quant_scales(hp: Tensor, quant_scale: Tensor, scale_row: Tensor, columns: int) -> tuple[Tensor, ScaleLayout]:
    """Return the scales of the rows of `hp`, and their layout, for `scaling.cast_blocks`.

    `quant_scale` has one or more numbers for each row of scales, one per `columns` columns.
    """
    return quant_scale.view(len(quant_scale), -1)[scale_row], _make_row_blocks(hp, columns)


def _cast_groups_fake(hp: Tensor, cast: GroupCast) -> Operands:
    scaling.check_hp(hp)

    def make_operand(layout: ScaleLayout) -> Operand:
        dequant, quant = _make_zero_scales(hp, layout, cast.num_groups)
        return Operand(hp.new_empty(hp.shape, dtype=cast.float8_dtype), dequant, layout, quant)

    return cast_by_layout(make_operand, cast.row, cast.column, cast.row_layout)


def _make_zero_scales(hp: Tensor, layout: ScaleLayout, num_groups: int) -> tuple[Tensor, Tensor]:
    dequant = hp.new_zeros(get_scale_shape(layout, num_groups, *hp.shape), dtype=torch.float32)
    return dequant, torch.zeros_like(dequant)


def _cast_groups_cpu(hp: Tensor, cast: GroupCast) -> Operands | None:
    """Cast each group by the table of casts; or all rows at once, if no scale depends on the groups."""
    float8_dtype, ends, num_groups, row, column, power_of_2, granularity, dot_products, length, rule = cast
    if not (cpu.supports(hp, float8_dtype) and has_cast_kernel(rule)):
        return None
    name, bounds = ScalingGranularity(granularity), find_group_bounds(ends, num_groups, hp.shape[0])
    is_blockwise = name is ScalingGranularity.BLOCKWISE
    options = (dot_products, length, rule) if is_blockwise else (rule,)
    row_layout = cast.row_layout

    def quantize(layout: ScaleLayout) -> Operand:
        is_column = layout != row_layout

        def cast_matrix(matrix: Tensor) -> Operand:
            operands = CASTS[name](matrix, float8_dtype, not is_column, is_column, power_of_2, *options)
            return operands.column if is_column else operands.row

        if layout.rows == 1:
            return cast_matrix(hp)
        if ends is None and layout.rows != ALL and (hp.shape[0] // num_groups) % layout.rows == 0:
            operand = cast_matrix(hp)
            dequant, quant = (
                _add_unused_rows(require(scale, "the scale"), num_groups)
                for scale in (operand.dequant_scale, operand.quant_scale)
            )
            return Operand(operand.data, dequant, layout, quant)
        codes, scales = torch.empty_like(hp, dtype=float8_dtype), _make_zero_scales(hp, layout, num_groups)
        for group, (start, stop) in enumerate(bounds):
            rows = slice(start, stop)
            if is_blockwise or rule:
                operand = cast_matrix(hp[rows])
                codes[rows] = operand.data
                group_scales = [require(scale, "the scale") for scale in (operand.dequant_scale, operand.quant_scale)]
            else:
                dim = 0 if is_column else None
                results: Any = cpu.dynamic_cast(hp[rows], float8_dtype, dim, power_of_2=power_of_2, codes=codes[rows])
                group_scales = [results[2], results[1]]
            first = find_first_scale_row(layout.rows, group, start)
            for scale, group_scale in zip(scales, group_scales, strict=True):
                scale[first : first + (group_scale.shape[0] if group_scale.dim() else 1)] = group_scale
        codes[bounds[-1][1] :].view(torch.uint8).zero_()
        return Operand(codes, scales[0], layout, scales[1])

    return cast_by_layout(quantize, row, column, row_layout)


def _add_unused_rows(scales: Tensor, num_groups: int) -> Tensor:
    """Append the unused row of [Note: scale rows] to each group's scales, for groups of whole blocks."""
    return F.pad(scales.view(num_groups, -1, scales.shape[1]), (0, 0, 0, 1)).view(-1, scales.shape[1])


_operation = register_operation(
    _cast_groups,
    arguments=GroupCast,
    cpu=_cast_groups_cpu,
    fake=_cast_groups_fake,
    phase=CAST_PHASE,
    layout=lambda *, granularity, dot_products, length, **_: get_cast_layout(granularity, dot_products, length),
)


def cast_groups(
    hp: Tensor, cast: CastConfig, ends: Tensor | None, num_groups: int, *, row: bool, column: bool, power_of_2: bool
) -> Operands:
    """Quantize groups of rows with one cast. A disabled cast returns `hp` itself.

    Args:
        hp: [rows, columns], contiguous.
        ends, num_groups: see groups.py.
    """
    if cast.is_disabled:
        return select_directions(Operand(hp), row, column)
    granularity, options = cast.scaling_granularity.value, (*(cast.block_size or (0, 0)), cast.rule)
    cast.require_layout("grouped matmuls")
    group_cast = GroupCast(cast.float8_dtype, ends, num_groups, row, column, power_of_2, granularity, *options)
    return _operation(hp, *group_cast)
