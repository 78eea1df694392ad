"""Casts to float8 of a matrix whose rows belong to groups (groups.py), each with scales of its own.

On a CPU each group is cast by the table of casts (kernels/cast.py). Elsewhere PyTorch casts all groups at once: amaxes
of rows, reduced by group; no number leaves the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.experts.groups import bounds_of, count_of_scales, first_scale, layout_of_cast, scale_rows, shape_of_scales
from quaver.kernels import cpu
from quaver.kernels.cast import CASTS, cast_blocks_with_scale, realize_scales
from quaver.kernels.operands import Operand, Operands, cast_by_layout, expect, select_directions
from quaver.kernels.operation import operation
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, ScalingGranularity
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.recipes.scale_rules import has_kernel
from quaver.runtime.phases import phase

# ---- the reference ---------------------------------------------------------------------------------------------------


def _cast_groups(
    hp: Tensor,
    float8_dtype: torch.dtype,
    ends: Tensor | None,
    groups: int,
    row: bool,
    column: bool,
    power_of_2: bool,
    granularity: str,
    dot_products: int,
    length: int,
    mode: str,
) -> Operands:
    """Quantize groups of rows, for one or both of their matmuls.

    Args:
        hp: [rows, columns].
        ends, groups: see groups.py.
        granularity: of `ScalingGranularity`; with "blockwise", the rest is as for `cast_blockwise`, else 0, 0 and the
            mode of `cast_tensorwise`.
    Returns:
        Operands with the scales of groups.py.
    """
    cpu.check_memory(hp, ends)
    is_blockwise = granularity == ScalingGranularity.BLOCKWISE.value
    row_layout = layout_of_cast(granularity, (dot_products, length))

    def cast(layout: ScaleLayout) -> Operand:
        rows, columns = layout.rows, layout.columns
        count = count_of_scales(rows, groups, hp.shape[0])
        scale_row = scale_rows(ends, groups, hp.shape[0], rows, hp.device)
        amax = _amaxes(hp, ends, groups, layout, scale_row)
        amax = amax.to(hp.dtype) if mode else amax  # exact; see `compute_scales`
        scales = scaling.compute_scales(amax, float8_dtype, power_of_2, mode, is_blockwise=is_blockwise)
        quant, dequant, _ = scales = realize_scales(scales)
        factor, division = scaling.choose_factor(scales, mode)
        shape = shape_of_scales(layout, groups, *hp.shape)
        row_scales, of_row = scales_per_row(hp, factor, scale_row, columns)
        if column and not (row and layout == row_layout) and torch.compiler.is_dynamo_compiling():
            # The transpose shares no node with row codes, so that the backward can compute its own (kernels/cast.py).
            turned = cast_blocks_with_scale(hp.t(), row_scales.t(), float8_dtype, of_row.t(), True, division)
            codes = turned.t().contiguous()
        else:
            codes = cast_blocks_with_scale(hp, row_scales, float8_dtype, of_row, True, division)
        return Operand(codes, dequant[:count].view(shape), layout, quant[:count].view(shape))

    return cast_by_layout(cast, row, column, row_layout)


def _part_of_row(hp: Tensor, columns: int) -> ScaleLayout:
    """Blocks of one row with so many columns."""
    return ScaleLayout(1, columns or max(hp.shape[1], 1))


def _amaxes(hp: Tensor, ends: Tensor | None, groups: int, layout: ScaleLayout, scale_row: Tensor) -> Tensor:
    """`amax_of_scale_rows`, without a scatter where each row has its own scale, or all scales have as many rows."""
    rows, columns = layout.rows, layout.columns
    is_even = rows == ALL and ends is None and hp.shape[0] > 0
    if rows != 1 and not is_even:
        return amax_of_scale_rows(hp, scale_row, count_of_scales(rows, groups, hp.shape[0]), columns)
    amax = scaling.block_amax(hp, _part_of_row(hp, columns)).float()
    amax = amax.view(groups, -1, amax.shape[1]).amax(1) if is_even else amax
    return F.pad(amax, (0, 0, 0, 1))


def amax_of_scale_rows(hp: Tensor, scale_row: Tensor, count: int, columns: int) -> Tensor:
    """The amax of each row of scales, float32 [count + 1, blocks of columns]; the last one is of rows of no group."""
    if columns == 1:
        return group_amax(hp, scale_row, count + 1)
    return _largest_by(scale_row, count + 1, scaling.block_amax(hp, _part_of_row(hp, columns)))


def _group_amax(hp: Tensor, group: Tensor, groups: int) -> Tensor:
    """The amax of each column of `hp` [R, C] over the rows of each group, float32 [groups, C]; `group` is int64 [R]."""
    return _largest_by(group, groups, scaling.block_amax(hp, ScaleLayout(1, 1)))


def _fake_group_amax(hp: Tensor, group: Tensor, groups: int) -> Tensor:
    scaling.check_hp(hp)
    return hp.new_empty(groups, hp.shape[1], dtype=torch.float32)


# Inductor would scatter: it writes the magnitudes as int32, and has an atomic for each of them.
group_amax = operation(
    _group_amax, results=1, gpu="group_amax", fake=_fake_group_amax, in_graphs=True, phase="quaver::cast"
)


def _largest_by(group: Tensor, groups: int, magnitudes: Tensor) -> Tensor:
    bits = magnitudes.float().view(torch.int32)  # they order as the magnitudes do, NaNs on top
    largest = bits.new_zeros(groups, bits.shape[1])
    return largest.scatter_reduce(0, group[:, None].expand(bits.shape), bits, "amax").view(torch.float32)


def scales_per_row(hp: Tensor, quant_scale: Tensor, scale_row: Tensor, columns: int) -> tuple[Tensor, ScaleLayout]:
    """The scales of the rows of `hp` and their layout, as `cast_blocks_with_scale` takes them.

    `quant_scale` has a number per row of scales, or a row of them, one for `columns` columns each.
    """
    return quant_scale.view(len(quant_scale), -1)[scale_row], _part_of_row(hp, columns)


def _fake_groups(
    hp: Tensor, float8_dtype: torch.dtype, ends: Tensor | None, groups: int, row: bool, column: bool, *rest: Any
) -> Operands:
    """Shapes only."""
    scaling.check_hp(hp)
    _, granularity, *options = rest

    def cast(layout: ScaleLayout) -> Operand:
        dequant, quant = _new_scales(hp, layout, groups)
        return Operand(hp.new_empty(hp.shape, dtype=float8_dtype), dequant, layout, quant)

    return cast_by_layout(cast, row, column, layout_of_cast(granularity, options))


def _new_scales(hp: Tensor, layout: ScaleLayout, groups: int) -> tuple[Tensor, Tensor]:
    """Zeros for dequant_scale and quant_scale."""
    dequant = hp.new_zeros(shape_of_scales(layout, groups, *hp.shape), dtype=torch.float32)
    return dequant, torch.zeros_like(dequant)


# ---- CPU -------------------------------------------------------------------------------------------------------------


def _cpu_groups(
    hp: Tensor, float8_dtype: torch.dtype, ends: Tensor | None, groups: int, row: bool, column: bool, *rest: Any
) -> Operands | None:
    """By the table of casts, each group as a matrix; what does not depend on groups, in one."""
    if not cpu.takes(hp, float8_dtype):
        return None
    power_of_2, granularity, *options = rest
    name, bounds = ScalingGranularity(granularity), bounds_of(ends, groups, hp.shape[0])
    if not has_kernel(options[2]):
        return None
    by_rule = options[2:] if options[2] else []
    block_options = options if name is ScalingGranularity.BLOCKWISE else by_rule
    row_layout = layout_of_cast(granularity, options)

    def cast(layout: ScaleLayout) -> Operand:
        is_column = layout != row_layout

        def in_table(matrix: Tensor) -> Operand:
            operands = CASTS[name](matrix, float8_dtype, not is_column, is_column, power_of_2, *block_options)
            operand: Operand = operands.column if is_column else operands.row
            return operand

        if layout.rows == 1:
            return in_table(hp)
        if ends is None and layout.rows != ALL and (hp.shape[0] // groups) % layout.rows == 0:
            made = in_table(hp)
            dequant, quant = (
                _with_unused_rows(expect(each), groups) for each in (made.dequant_scale, made.quant_scale)
            )
            return Operand(made.data, dequant, layout, quant)
        codes, scales = torch.empty_like(hp, dtype=float8_dtype), _new_scales(hp, layout, groups)
        for group, (start, stop) in enumerate(bounds):
            if block_options:
                of_group = in_table(hp[start:stop])
                codes[start:stop] = of_group.data
                group_scales = [expect(of_group.dequant_scale), expect(of_group.quant_scale)]
            else:
                dim = 0 if is_column else None
                rows = hp[start:stop], codes[start:stop]
                parts: Any = cpu.dynamic_cast(rows[0], float8_dtype, dim, power_of_2=power_of_2, codes=rows[1])
                group_scales = [parts[2], parts[1]]
            first = first_scale(layout.rows, group, start)
            for scale, group_scale in zip(scales, group_scales, strict=True):
                scale[first : first + (group_scale.shape[0] if group_scale.dim() else 1)] = group_scale
        codes[bounds[-1][1] :].view(torch.uint8).zero_()
        return Operand(codes, scales[0], layout, scales[1])

    return cast_by_layout(cast, row, column, row_layout)


def _with_unused_rows(scales: Tensor, groups: int) -> Tensor:
    """Scales of blocks that no group cuts, with the unused row after each group; see [Note: scale rows]."""
    return F.pad(scales.view(groups, -1, scales.shape[1]), (0, 0, 0, 1)).view(-1, scales.shape[1])


def _row_layout(*args: Any) -> ScaleLayout:
    return layout_of_cast(args[7], args[8:])


_operation = operation(_cast_groups, cpu=_cpu_groups, fake=_fake_groups, layout=_row_layout)


@phase("quaver::cast")
def cast_groups(
    hp: Tensor, cast: CastConfig, ends: Tensor | None, groups: int, row: bool, column: bool, power_of_2: bool
) -> Operands:
    """Quantize groups of rows by one cast; a disabled one gives `hp` itself.

    Args:
        hp: [rows, columns], contiguous.
        ends, groups: see groups.py.
    """
    if cast.is_disabled:
        return select_directions(Operand(hp), row, column)
    granularity, options = cast.scaling_granularity.value, (*(cast.block_size or (0, 0)), cast.mode)
    cast.known_layout("grouped matmuls")
    operands: Operands = _operation(hp, cast.float8_dtype, ends, groups, row, column, power_of_2, granularity, *options)
    return operands
