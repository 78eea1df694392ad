"""The table of casts to float8: for each granularity its reference, and its kernels for CPUs and GPUs.

                                  scales from                       CPU            GPU       compiled for a GPU
    cast_tensorwise               the amax of the matrix            C extension    Triton    PyTorch (*)
    cast_rowwise                  the amaxes of rows, of columns    C extension    Triton    PyTorch (*)
    cast_blockwise                the amaxes of blocks              C extension    Triton    PyTorch (*)
    cast_with_scale               the caller                        C extension    Triton    PyTorch

(*) The registered operation if the input is materialized and both layouts are needed (`MATERIALIZED_CASTS`,
    docs/design/0018). Square blocks always use it, because they are for weights.

persistent_cast.py has the casts with the scale of an earlier step.

A matrix hp [R, C] is the operand of two matmuls (linear/quantize.py). `row` requests the operand of the matmul along
its rows, `column` the operand of the matmul along its columns. Tensors that neither the C extension nor Triton
supports (other dtypes, strides, devices) are cast in PyTorch. scaling.py is the oracle: all codes and scales are
bit-identical to it.

Results. A dynamic cast returns `Operands` (operands.py). With tensorwise scales or square blocks, both operands have
the same scales; on a CPU both are one object. `CASTS` lists the dynamic casts by granularity. To add one, add its
reference and an entry (docs/extending.md).

Layouts. A GPU multiplies float8 only along the contiguous dim: there, row codes are contiguous and column codes have
strides (1, R). Block scales have the strides that the matmul reads (`has_column_major_scales`). A CPU multiplies any
layout: there, codes and scales are contiguous.

operation.py says when a cast is an operation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.operands import (
    BlockCast,
    FlatOperands,
    Operand,
    Operands,
    cast_by_layout,
    empty_block_scales,
    has_column_major_scales,
    pair_codes,
    select_directions,
    unflatten_operands,
)
from quaver.kernels.operation import find_triton_kernels, register_operation, wrap_registered_cast
from quaver.recipes import scaling
from quaver.recipes.config import ScalingGranularity
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import ALL, COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout, make_block_layout
from quaver.recipes.scale_rules import divides, has_cast_kernel, report_missing_kernel
from quaver.runtime.compile_hints import wait_for_codes
from quaver.runtime.devices import is_cpu
from quaver.runtime.phases import phase
from quaver.torch_private.dispatch import count_dispatch_modes

CAST_PHASE = "quaver::cast"
_amax = phase("quaver::amax")(scaling.compute_amax)


def _cast_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str
) -> Operands:
    """Quantize with one scale, computed from the amax of the matrix.

    `rule`: the name of a rule in recipes/scale_rules.py; "" for quaver's rule.
    """
    cpu.check_memory(hp)
    report_missing_kernel(rule)
    scales = realize_scales(scaling.compute_scales(_amax(hp), float8_dtype, power_of_2, rule))
    quant, dequant, _ = scales
    factor = scaling.choose_factor(scales, rule)
    if not (torch.compiler.is_dynamo_compiling() and column) or is_cpu(hp):
        codes = scaling.cast_to_float8(hp, factor, float8_dtype, is_own_scale=True, rule=rule)
        return _make_operands(codes, quant, dequant, row, column)
    # Compiled code converts once for each layout; see `wait_for_codes`.
    row_codes = cast_row_codes(hp, factor, float8_dtype, is_own_scale=True, rule=rule) if row else None
    column_factor = factor if row_codes is None else wait_for_codes(factor, row_codes)
    column_codes = cast_column_codes(hp, column_factor, float8_dtype, is_own_scale=True, rule=rule)
    return pair_codes(row_codes, column_codes, quant, dequant)


def cast_row_codes(
    hp: Tensor, factor: Tensor, float8_dtype: torch.dtype, *, is_own_scale: bool = False, rule: str = ""
) -> Tensor:
    """Run `scaling.cast_to_float8` on a matrix, in the layout of row codes."""
    codes = scaling.cast_to_float8(hp, factor, float8_dtype, is_own_scale=is_own_scale, rule=rule)
    return codes if is_cpu(hp) else codes.contiguous()


def cast_column_codes(
    hp: Tensor, factor: Tensor, float8_dtype: torch.dtype, *, is_own_scale: bool = False, rule: str = ""
) -> Tensor:
    """Run `scaling.cast_to_float8` on a matrix, in the layout of column codes.

    Compiled code converts the transpose, so that the two conversions share no node of the graph. Otherwise, with a
    collective between an amax and the cast, the partitioner would save what both read, hp in float32, for backward.
    """
    if is_cpu(hp) or not torch.compiler.is_dynamo_compiling():
        codes = scaling.cast_to_float8(hp, factor, float8_dtype, is_own_scale=is_own_scale, rule=rule)
        return codes if is_cpu(hp) else to_column_major(codes)
    codes = scaling.cast_to_float8(hp.t(), factor.t(), float8_dtype, is_own_scale=is_own_scale, rule=rule)
    return codes.contiguous().t()


def _lay_out_column_codes(codes: Tensor) -> Tensor:
    """Run `to_column_major` on codes with no other reader, which compiled code converts directly into this layout."""
    return codes.t().contiguous().t() if torch.compiler.is_dynamo_compiling() else to_column_major(codes)


def _cast_rowwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str
) -> Operands:
    """Quantize rows (for row codes) and columns (for column codes), each with a scale computed from its amax.

    Scales are float32 [R, 1] and [1, C]. `rule`: as for `cast_tensorwise`.
    """
    cpu.check_memory(hp)
    report_missing_kernel(rule)

    def cast(layout: ScaleLayout) -> Operand:
        dim, cast_codes = (1, cast_row_codes) if layout == ROWWISE else (0, cast_column_codes)
        scales = scaling.compute_scales(_amax(hp, dim), float8_dtype, power_of_2, rule)
        scales = scales if dim else realize_scales(scales)  # a kernel over rows computes each scale once anyway
        factor = scaling.choose_factor(scales, rule)
        codes = cast_codes(hp, factor, float8_dtype, is_own_scale=True, rule=rule)
        return Operand(codes, scales.dequant, layout, scales.quant)

    return cast_by_layout(cast, row, column, ROWWISE)


def realize_scales(scales: scaling.CastScales) -> scaling.CastScales:
    """Make Inductor store scales in a buffer instead of computing them again for each element.

    Inductor realizes the argument of `as_strided`. The strides are computed from the shape, because reading a tensor's
    strides makes Dynamo restart the trace of a backward.
    """
    if not torch.compiler.is_dynamo_compiling():
        return scales
    return scaling.CastScales(_view_by_strides(scales.quant), _view_by_strides(scales.dequant))


def _view_by_strides(scale: Tensor) -> Tensor:
    strides = [math.prod(scale.shape[dim + 1 :]) for dim in range(scale.dim())]
    return scale.contiguous().as_strided(scale.shape, strides)


def _cast_blockwise(hp: Tensor, cast: BlockCast) -> Operands:
    """Quantize blocks, each with a scale computed from its amax. Strides of scales: see `has_column_major_scales`."""
    float8_dtype, row, column, power_of_2, _, _, rule = cast
    cpu.check_memory(hp)
    report_missing_kernel(rule)

    def quantize(layout: ScaleLayout) -> Operand:
        amax = scaling.compute_block_amax(hp, layout)
        is_column_major = not is_cpu(hp) and has_column_major_scales(layout, row)
        quant, dequant, outer = scaling.compute_scales(amax, float8_dtype, power_of_2, rule, is_blockwise=True)
        dequant = dequant.t().contiguous() if is_column_major else dequant
        quant, dequant, _ = realize_scales(scaling.CastScales(quant, dequant))
        dequant = dequant.t() if is_column_major else dequant
        factor = scaling.choose_factor(scaling.CastScales(quant, dequant), rule)
        codes = scaling.cast_blocks(hp, factor, float8_dtype, layout, is_own_scale=True, rule=rule)
        return Operand(codes, dequant, layout, quant, outer)

    operands = cast_by_layout(quantize, row, column, cast.row_layout)
    if is_cpu(hp) or operands.column is None:
        return operands
    return Operands(operands.row, operands.column._replace(data=_lay_out_column_codes(operands.column.data)))


def _cast_blockwise_cpu(hp: Tensor, cast: BlockCast) -> Operands | None:
    float8_dtype, row, column, power_of_2, _, _, rule = cast
    return _cast_by_rule_cpu(hp, float8_dtype, row, column, cast.row_layout, power_of_2, rule)


def _cast_blockwise_fake(hp: Tensor, cast: BlockCast) -> Operands:
    """Compute shapes only: the reference branches on whether blocks are cut, which would specialize a dynamic shape."""
    scaling.check_hp(hp)

    def make_operand(layout: ScaleLayout) -> Operand:
        is_column_major = not is_cpu(hp) and has_column_major_scales(layout, cast.row)
        quant, dequant = empty_block_scales(hp, layout, is_column_major=is_column_major)
        codes, outer = hp.new_empty(layout.get_codes_shape(hp.shape), dtype=cast.float8_dtype), None
        if layout.is_packed:
            dequant, outer = dequant.to(E4M3.dtype), hp.new_empty((), dtype=torch.float32)
        return Operand(codes, dequant, layout, quant, outer)

    operands = cast_by_layout(make_operand, cast.row, cast.column, cast.row_layout)
    if is_cpu(hp) or operands.column is None:
        return operands
    return Operands(operands.row, operands.column._replace(data=to_column_major(operands.column.data)))


def _make_operands(codes: Tensor, quant: Tensor, dequant: Tensor, row: bool, column: bool) -> Operands:
    """Return one set of codes in the requested layouts; on a CPU the same memory serves both."""
    if is_cpu(codes):
        return select_directions(Operand(codes, dequant, TENSORWISE, quant), row, column)
    return pair_codes(*lay_out_codes(codes, row, column), quant, dequant)


def lay_out_codes(codes: Tensor, row: bool, column: bool) -> tuple[Tensor | None, Tensor | None]:
    """Lay out `codes` in the requested layouts, of row codes and of column codes."""
    return codes.contiguous() if row else None, to_column_major(codes) if column else None


def _copy_to_column_major(codes: Tensor) -> Tensor:
    """Copy `codes` [..., R, C] so that each matrix has strides (1, R)."""
    return codes.new_empty(codes.mT.shape).copy_(codes.mT).mT


to_column_major = register_operation(_copy_to_column_major, results=1, gpu="to_column_major", in_graphs=True)


def to_row_major(codes: Tensor) -> Tensor:
    """Return `codes` [..., R, C] if they are contiguous, else a contiguous copy."""
    return codes if codes.is_contiguous() else to_column_major(codes.mT).mT


def _cast_tensorwise_cpu(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str
) -> Operands | None:
    if rule:
        return _cast_by_rule_cpu(hp, float8_dtype, row, column, TENSORWISE, False, rule)
    return _make_operands_cpu(cpu.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2), TENSORWISE, row, column)


def _make_operands_cpu(
    result: tuple[Tensor, Tensor, Tensor] | None, layout: ScaleLayout, row: bool, column: bool
) -> Operands | None:
    if result is None:
        return None
    codes, quant, dequant = result
    return select_directions(Operand(codes, dequant, layout, quant), row, column)


def _cast_by_rule_cpu(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    row_layout: ScaleLayout,
    power_of_2: bool,
    rule: str,
) -> Operands | None:
    """Compute the scales in PyTorch, and the codes and the amaxes of blocks in C."""
    if not (cpu.supports(hp, float8_dtype) and has_cast_kernel(rule)):
        return None

    def cast(layout: ScaleLayout) -> Operand:
        amax: Any
        if layout.is_blockwise:
            amax = cpu.compute_block_amax(hp, layout)
        else:
            amax = _amax(hp, None if layout.is_tensorwise else layout.index(ALL))
        scales = scaling.compute_scales(amax, float8_dtype, power_of_2, rule, is_blockwise=layout.is_blockwise)
        factor = scaling.choose_factor(scales, rule)
        codes: Any = cpu.cast_with_scale(hp, factor, float8_dtype, layout, divides=divides(rule))
        return Operand(codes, scales.dequant, layout, scales.quant)

    return cast_by_layout(cast, row, column, row_layout)


def _cast_rowwise_cpu(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str
) -> Operands | None:
    if rule:
        return _cast_by_rule_cpu(hp, float8_dtype, row, column, ROWWISE, False, rule)
    if row and column:
        tensors = cpu.dynamic_cast_both_dims(hp, float8_dtype, power_of_2=power_of_2)
        return None if tensors is None else unflatten_operands(FlatOperands(*tensors), row, column, ROWWISE)
    result = cpu.dynamic_cast(hp, float8_dtype, 1 if row else 0, power_of_2=power_of_2)
    return _make_operands_cpu(result, ROWWISE if row else COLUMNWISE, row, column)


def _cast_tensorwise_fake(hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, __: str) -> Operands:
    """Compute shapes only: computing scales on fake tensors took a sixth of the compile time."""
    scaling.check_hp(hp)
    quant, dequant = (hp.new_empty((), dtype=torch.float32) for _ in range(2))
    return _make_operands(torch.empty_like(hp, dtype=float8_dtype), quant, dequant, row, column)


def _cast_rowwise_fake(hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, __: str) -> Operands:
    scaling.check_hp(hp)
    rows, columns = hp.shape

    def make_operand(layout: ScaleLayout) -> Operand:
        shape = layout.get_scale_shape(rows, columns)
        quant, dequant = (hp.new_empty(shape, dtype=torch.float32) for _ in range(2))
        codes = torch.empty_like(hp, dtype=float8_dtype)
        if not is_cpu(hp):
            codes = to_column_major(codes) if layout == COLUMNWISE else codes.contiguous()
        return Operand(codes, dequant, layout, quant)

    return Operands(make_operand(ROWWISE) if row else None, make_operand(COLUMNWISE) if column else None)


def _get_tensorwise_layout(**_: object) -> ScaleLayout:
    return TENSORWISE


def _get_rowwise_layout(**_: object) -> ScaleLayout:
    return ROWWISE


def _get_blockwise_layout(*, float8_dtype: torch.dtype, dot_products: int, length: int, **_: object) -> ScaleLayout:
    return make_block_layout(float8_dtype, dot_products, length)


cast_tensorwise = register_operation(
    _cast_tensorwise,
    cpu=_cast_tensorwise_cpu,
    gpu="cast_tensorwise",
    fake=_cast_tensorwise_fake,
    phase=CAST_PHASE,
    layout=_get_tensorwise_layout,
)
cast_rowwise = register_operation(
    _cast_rowwise,
    cpu=_cast_rowwise_cpu,
    gpu="cast_rowwise",
    fake=_cast_rowwise_fake,
    phase=CAST_PHASE,
    layout=_get_rowwise_layout,
)
cast_blockwise = register_operation(
    _cast_blockwise,
    arguments=BlockCast,
    cpu=_cast_blockwise_cpu,
    gpu="cast_blockwise",
    fake=_cast_blockwise_fake,
    phase=CAST_PHASE,
    layout=_get_blockwise_layout,
)

CASTS = {
    ScalingGranularity.TENSORWISE: cast_tensorwise,
    ScalingGranularity.ROWWISE: cast_rowwise,
    ScalingGranularity.BLOCKWISE: cast_blockwise,
}
"""(hp, float8_dtype, row, column, power_of_2, *`CastConfig.trailing_arguments`) -> `Operands`."""


_ROWS_PER_RUN = 8
"""Rows that `_reduce_runs` reduces together."""


def _cast_materialized_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, rule: str
) -> Operands:
    scales = scaling.compute_scales(_amax(_reduce_runs(hp)), float8_dtype, power_of_2, rule)
    factor = scaling.choose_factor(scales, rule)
    row_codes, column_codes = torch.ops.quaver.cast_with_scale(hp, float8_dtype, factor, factor, rule)
    return pair_codes(row_codes, column_codes, scales.quant, scales.dequant)


def _reduce_runs(hp: Tensor) -> Tensor:
    """Return the matrix [R, C], or the amaxes of runs of its rows.

    Inductor reduces a matrix in runs whose number of elements is a power of two. It fuses the reduction into the kernel
    that computes the matrix if runs are whole rows, that is, if C is a power of two. For other C, this function reduces
    runs of `_ROWS_PER_RUN` rows first, if R is known to be a multiple.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as compilers do

    rows, columns = hp.shape
    if statically_known_true(columns & (columns - 1) == 0) or not statically_known_true(rows % _ROWS_PER_RUN == 0):
        return hp
    return hp.reshape(rows // _ROWS_PER_RUN, -1).abs().amax(1)


MATERIALIZED_CASTS: dict[ScalingGranularity, Any] = {
    ScalingGranularity.TENSORWISE: _cast_materialized_tensorwise,
    ScalingGranularity.ROWWISE: wrap_registered_cast(torch.ops.quaver.cast_rowwise, _get_rowwise_layout),
    ScalingGranularity.BLOCKWISE: wrap_registered_cast(torch.ops.quaver.cast_blockwise, _get_blockwise_layout),
}
"""`CASTS` for a materialized matrix in compiled code, by operations that write both layouts.

The amax of a tensorwise cast is PyTorch's, so that Inductor computes it in the kernel that writes the matrix.
"""


def _cast_with_scale(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None, rule: str
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize with given scales.

    Args:
        row_scale: float32 () or [R, 1], the `factor` of the row codes; None for no row codes.
        column_scale: float32 () or [1, C], the `factor` of the column codes; None for no column codes.
        rule: as for `scaling.cast_to_float8`.
    Returns:
        Row codes, column codes.
    Raises:
        ValueError: hp is not in a high-precision dtype, for example because a weight's `.data` was replaced under
            compiled code.
    """
    scaling.check_hp(hp)
    cpu.check_memory(hp, row_scale, column_scale)
    report_missing_kernel(rule)
    row_codes = column_codes = None
    if row_scale is not None:
        row_codes = cast_row_codes(hp, row_scale, float8_dtype, rule=rule)
    if column_scale is not None:
        column_scale = column_scale if row_codes is None else wait_for_codes(column_scale.clone(), row_codes)
        column_codes = cast_column_codes(hp, column_scale, float8_dtype, rule=rule)
    return row_codes, column_codes


def _cast_with_scale_cpu(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None, rule: str
) -> tuple[Tensor | None, ...] | None:
    codes: list[Tensor | None] = []
    if not has_cast_kernel(rule):
        return None
    for scale in (row_scale, column_scale):
        if scale is not None and not scale.is_contiguous():
            cpu.check_memory(scale)
            scale = scale.contiguous()
        codes.append(None if scale is None else cpu.cast_with_scale(hp, scale, float8_dtype, divides=divides(rule)))
        if scale is not None and codes[-1] is None:
            return None
    return tuple(codes)


cast_with_scale = register_operation(
    _cast_with_scale, results=2, cpu=_cast_with_scale_cpu, gpu="cast_with_scale", phase=CAST_PHASE
)


cast_blocks_with_scale = phase(CAST_PHASE)(scaling.cast_blocks)
"""`scaling.cast_blocks` in a profiler range, for shards that are quantized before an all-gather."""


@phase("quaver::amax")
def compute_matrix_amax(hp: Tensor, dim: int | None) -> Tensor:
    """Run `scaling.compute_amax` on a matrix and return float32, for amaxes that ranks reduce before they quantize.

    Under a dispatch mode it runs in PyTorch, so that a selective-checkpoint policy can save the amax.
    """
    under_mode = torch.compiler.is_dynamo_compiling() or count_dispatch_modes() > 0
    triton_cast = None if under_mode else find_triton_kernels(hp)
    amax: Tensor | None = None if triton_cast is None else triton_cast.compute_amax(hp, dim)
    return scaling.compute_amax(hp, dim).float() if amax is None else amax


def _to_column_major_after(codes: Tensor, gradient: Tensor) -> Tensor:
    """Run `to_column_major` in the backward, on codes that an all-gather or `cast_weights_once` made before the graph.

    A compiler may copy a graph's input in the forward and save the copy for backward. Reading a gradient prevents it.
    """
    return to_column_major(codes)


to_column_major_after = register_operation(_to_column_major_after, results=1, in_graphs=True)
