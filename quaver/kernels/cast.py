"""The table of casts to float8: for each granularity its reference, and its kernels for CPUs and GPUs.

                                  scales from                       CPU            GPU       compiled for a GPU
    cast_tensorwise               the amax of the matrix            C extension    Triton    PyTorch (*)
    cast_rowwise                  the amaxes of rows, of columns    C extension    Triton    PyTorch (*)
    cast_blockwise                the amaxes of blocks              C extension    Triton    PyTorch (*)
    cast_with_scale               the caller                        C extension    Triton    PyTorch

(*) Of a matrix that is in memory, for both directions at once, the operation (`CASTS_OF_STORED`, docs/design/0018).
    So are square blocks for either direction, because they are a weight's.

Casts with the scale of an earlier step are in persistent_cast.py.

A matrix hp [R, C] is the operand of two matmuls (linear/quantize.py): `row` asks for what the matmul along its rows
reads, `column` for what the one along its columns reads. What the C extension or Triton does not take (other dtypes,
strides, devices) runs in PyTorch; scaling.py is the oracle, to the bit.

Results. A cast with scales of its own returns `Operands` (operands.py). Tensorwise and square blocks give both operands
one scale; on a CPU they are one object. `CASTS` has these casts by granularity; to add one, add its reference and a row
(docs/extending.md).

Layouts. A GPU multiplies float8 only along the contiguous dim: there, row codes are contiguous and column codes have
strides (1, R). Scales of blocks lie as the matmul reads them, too (`has_scales_by_columns`). A CPU takes any layout:
there, codes and scales are contiguous.

For when casts are operations see operation.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.operands import (
    Operand,
    Operands,
    asked_for,
    cast_by_layout,
    empty_block_scales,
    has_scales_by_columns,
    of_one_scale,
    unflattened,
)
from quaver.kernels.operation import operation, returning_operands, triton_kernels
from quaver.recipes import scaling
from quaver.recipes.config import ScalingGranularity
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import ALL, COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout, layout_of_blocks
from quaver.recipes.scale_rules import has_kernel
from quaver.runtime.compile_hints import apart
from quaver.runtime.devices import is_cpu
from quaver.runtime.phases import phase
from quaver.torch_private.dispatch import count_dispatch_modes

CAST = "quaver::cast"
_amax = phase("quaver::amax")(scaling.amax)


# ---- dynamic scales --------------------------------------------------------------------------------------------------


def _cast_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, mode: str = ""
) -> Operands:
    """Quantize with the scale of the matrix's own amax.

    `mode`: a rule of recipes/scale_rules.py; "" for quaver's.
    """
    cpu.check_memory(hp)
    scales = computed_once(scaling.scales_of(_amax(hp), float8_dtype, power_of_2, mode or None))
    quant, dequant, _ = scales
    factor, divisor_of = scaling.factor_of(scales, mode)
    if not (torch.compiler.is_dynamo_compiling() and column) or is_cpu(hp):
        codes = scaling.cast_to_float8(hp, factor, float8_dtype, is_of_amax=True, divisor_of=divisor_of)
        return _laid_out(codes, quant, dequant, row, column)
    # Compiled code converts twice; see `apart`.
    row_codes = cast_row_codes(hp, factor, float8_dtype, True, divisor_of) if row else None
    of_columns = factor if row_codes is None else apart(factor, row_codes)
    column_codes = cast_column_codes(hp, of_columns, float8_dtype, True, divisor_of)
    return of_one_scale(row_codes, column_codes, quant, dequant)


def cast_row_codes(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, is_of_amax: bool = False, divisor_of: str = ""
) -> Tensor:
    """`scaling.cast_to_float8` of a matrix, in the layout of row codes."""
    codes = scaling.cast_to_float8(hp, quant_scale, float8_dtype, is_of_amax=is_of_amax, divisor_of=divisor_of)
    return codes if is_cpu(hp) else codes.contiguous()


def cast_column_codes(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, is_of_amax: bool = False, divisor_of: str = ""
) -> Tensor:
    """`scaling.cast_to_float8` of a matrix, in the layout of column codes.

    Compiled code converts the transpose, so that both conversions share no node. Where a collective lies between an
    amax and the cast, the partitioner recomputes nothing in the backward that row codes read too, as hp in float32.
    """
    if is_cpu(hp) or not torch.compiler.is_dynamo_compiling():
        codes = scaling.cast_to_float8(hp, quant_scale, float8_dtype, is_of_amax=is_of_amax, divisor_of=divisor_of)
        return codes if is_cpu(hp) else column_major(codes)
    turned, scale = hp.t(), quant_scale.t()
    codes = scaling.cast_to_float8(turned, scale, float8_dtype, is_of_amax=is_of_amax, divisor_of=divisor_of)
    return codes.contiguous().t()


def _transposed(codes: Tensor) -> Tensor:
    """`column_major` of codes that no other tensor has; compiled code converts into this layout."""
    return codes.t().contiguous().t() if torch.compiler.is_dynamo_compiling() else column_major(codes)


def _cast_rowwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, mode: str = ""
) -> Operands:
    """Quantize each row (for row codes) and each column (for column codes) with the scale of its amax.

    Scales are float32 [R, 1] and [1, C]. `mode`: as for `cast_tensorwise`.
    """
    cpu.check_memory(hp)
    made: list[Operand | None] = []
    for dim, asked in ((1, row), (0, column)):
        if asked:
            scales = scaling.scales_of(_amax(hp, dim), float8_dtype, power_of_2, mode or None)
            scales = scales if dim else computed_once(scales)  # a kernel of rows computes theirs once
            factor, divisor_of = scaling.factor_of(scales, mode)
            codes = (cast_row_codes if dim else cast_column_codes)(hp, factor, float8_dtype, True, divisor_of)
            made.append(Operand(codes, scales.dequant, ROWWISE if dim else COLUMNWISE, scales.quant))
        else:
            made.append(None)
    return Operands(*made)


def computed_once(scales: scaling.Scales) -> scaling.Scales:
    """Keep Inductor from computing a scale in each element that it scales; it also stored that in float32.

    Of what is viewed by strides Inductor makes a buffer. The strides are computed, because Dynamo starts the trace of a
    backward again when it is asked for those of a tensor.
    """
    if not torch.compiler.is_dynamo_compiling():
        return scales
    return scaling.Scales(_viewed_by_strides(scales.quant), _viewed_by_strides(scales.dequant))


def _viewed_by_strides(scale: Tensor) -> Tensor:
    strides = [math.prod(scale.shape[dim + 1 :]) for dim in range(scale.dim())]
    return scale.contiguous().as_strided(scale.shape, strides)


def _cast_blockwise(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    dot_products: int,
    length: int,
    mode: str,
) -> Operands:
    """Quantize blocks of `dot_products` x `length` with the scales of their own amaxes.

    Row blocks have `length` columns and scales [ceil(R / dot_products), ceil(C / length)], column blocks `length` rows
    and scales [ceil(R / length), ceil(C / dot_products)]. Square blocks are one. `mode`: "", a ScaleCalculationMode or
    a rule of recipes/scale_rules.py. A dequant_scale lies as `has_scales_by_columns` says.
    """
    cpu.check_memory(hp)

    def cast(layout: ScaleLayout) -> Operand:
        amax = scaling.block_amax(hp, layout)
        by_columns = not is_cpu(hp) and has_scales_by_columns(layout, row)
        quant, dequant, outer = scaling.scales_of(amax, float8_dtype, power_of_2, mode)
        dequant = dequant.t().contiguous() if by_columns else dequant
        quant, dequant, _ = computed_once(scaling.Scales(quant, dequant))
        dequant = dequant.t() if by_columns else dequant
        factor, divisor_of = scaling.factor_of(scaling.Scales(quant, dequant), mode)
        codes = scaling.cast_blocks(hp, factor, float8_dtype, layout, True, divisor_of)
        return Operand(codes, dequant, layout, quant, outer)

    made = cast_by_layout(cast, row, column, layout_of_blocks(float8_dtype, dot_products, length))
    if is_cpu(hp) or made.column is None:
        return made
    return Operands(made.row, made.column._replace(data=_transposed(made.column.data)))


def _cpu_blockwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, *blocks: Any
) -> Operands | None:
    """The rules of scales are PyTorch's here too: C finds the amaxes and casts with the scales."""
    dot_products, length, mode = blocks

    def cast(layout: ScaleLayout) -> Operand:
        amax: Any = cpu.block_amax(hp, layout)
        return _cpu_by_scales(hp, scaling.scales_of(amax, float8_dtype, power_of_2, mode), float8_dtype, layout, mode)

    layout = layout_of_blocks(float8_dtype, dot_products, length)
    takes = cpu.takes(hp, float8_dtype) and has_kernel(mode)
    return cast_by_layout(cast, row, column, layout) if takes else None


def _cpu_by_scales(
    hp: Tensor, scales: scaling.Scales, float8_dtype: torch.dtype, layout: ScaleLayout, mode: str
) -> Operand:
    factor, divisor_of = scaling.factor_of(scales, mode)
    codes: Any = cpu.cast_with_scale(hp, factor, float8_dtype, layout, divides=bool(divisor_of))
    return Operand(codes, scales.dequant, layout, scales.quant)


def _fake_blockwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, dot_products: int, length: int, __: str
) -> Operands:
    """Shapes only: the reference asks where blocks are cut, which would bind a dynamic shape."""
    scaling.check_hp(hp)

    def cast(layout: ScaleLayout) -> Operand:
        by_columns = not is_cpu(hp) and has_scales_by_columns(layout, row)
        quant, dequant = empty_block_scales(hp, layout, by_columns)
        codes, outer = hp.new_empty(layout.shape_of_codes(hp.shape), dtype=float8_dtype), None
        if layout.is_packed:
            dequant, outer = dequant.to(E4M3.dtype), hp.new_empty((), dtype=torch.float32)
        return Operand(codes, dequant, layout, quant, outer)

    made = cast_by_layout(cast, row, column, layout_of_blocks(float8_dtype, dot_products, length))
    if is_cpu(hp) or made.column is None:
        return made
    return Operands(made.row, made.column._replace(data=column_major(made.column.data)))


def _laid_out(codes: Tensor, quant: Tensor, dequant: Tensor, row: bool, column: bool) -> Operands:
    """One set of codes in the layouts that were asked for; on a CPU one serves both."""
    if is_cpu(codes):
        return asked_for(Operand(codes, dequant, TENSORWISE, quant), row, column)
    return of_one_scale(*in_layouts(codes, row, column), quant, dequant)


def in_layouts(codes: Tensor, row: bool, column: bool) -> tuple[Tensor | None, Tensor | None]:
    """Codes in the layouts of row codes and of column codes that were asked for."""
    return codes.contiguous() if row else None, column_major(codes) if column else None


def _column_major(codes: Tensor) -> Tensor:
    """A copy of `codes` [..., R, C] in which each matrix has strides (1, R)."""
    return codes.new_empty(codes.mT.shape).copy_(codes.mT).mT


column_major = operation(_column_major, results=1, gpu="column_major", in_graphs=True)


def row_major(codes: Tensor) -> Tensor:
    """`codes` [..., R, C], contiguous: themselves, or a copy."""
    return codes if codes.is_contiguous() else column_major(codes.mT).mT


def _cpu_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, mode: str = ""
) -> Operands | None:
    if mode:
        return _cpu_by_rule(hp, float8_dtype, row, column, TENSORWISE, mode)
    made = cpu.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
    return None if made is None else asked_for(Operand(made[0], made[2], TENSORWISE, made[1]), row, column)


def _cpu_by_rule(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, row_layout: ScaleLayout, mode: str
) -> Operands | None:
    """PyTorch finds amaxes and scales, C casts with them."""
    if not (cpu.takes(hp, float8_dtype) and has_kernel(mode)):
        return None

    def cast(layout: ScaleLayout) -> Operand:
        amax = _amax(hp, None if layout.is_tensorwise else layout.index(ALL))
        return _cpu_by_scales(hp, scaling.scales_of(amax, float8_dtype, False, mode), float8_dtype, layout, mode)

    return cast_by_layout(cast, row, column, row_layout)


def _cpu_rowwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, mode: str = ""
) -> Operands | None:
    made: Any
    if mode:
        return _cpu_by_rule(hp, float8_dtype, row, column, ROWWISE, mode)
    if row and column:
        made = cpu.dynamic_cast_axes(hp, float8_dtype, power_of_2=power_of_2)
        return None if made is None else unflattened(made, row, column, ROWWISE)
    made = cpu.dynamic_cast(hp, float8_dtype, 1 if row else 0, power_of_2=power_of_2)
    layout = ROWWISE if row else COLUMNWISE
    return None if made is None else asked_for(Operand(made[0], made[2], layout, made[1]), row, column)


def _fake_tensorwise(hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, __: str = "") -> Operands:
    """Shapes only: computing scales on fake tensors takes a sixth of the time of a compilation."""
    scaling.check_hp(hp)
    quant, dequant = (hp.new_empty((), dtype=torch.float32) for _ in range(2))
    return _laid_out(torch.empty_like(hp, dtype=float8_dtype), quant, dequant, row, column)


def _fake_rowwise(hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, __: str = "") -> Operands:
    scaling.check_hp(hp)
    rows, columns = hp.shape

    def operand(layout: ScaleLayout) -> Operand:
        shape = layout.scale_shape(rows, columns)
        quant, dequant = (hp.new_empty(shape, dtype=torch.float32) for _ in range(2))
        codes = torch.empty_like(hp, dtype=float8_dtype)
        if not is_cpu(hp):
            codes = column_major(codes) if layout == COLUMNWISE else codes.contiguous()
        return Operand(codes, dequant, layout, quant)

    return Operands(operand(ROWWISE) if row else None, operand(COLUMNWISE) if column else None)


def _tensorwise(*_: object) -> ScaleLayout:
    return TENSORWISE


def _rowwise(*_: object) -> ScaleLayout:
    return ROWWISE


def _of_blocks(*args: Any) -> ScaleLayout:
    return layout_of_blocks(args[1], args[5], args[6])


cast_tensorwise = operation(
    _cast_tensorwise,
    cpu=_cpu_tensorwise,
    gpu="cast_tensorwise",
    fake=_fake_tensorwise,
    phase=CAST,
    layout=_tensorwise,
)
cast_rowwise = operation(
    _cast_rowwise, cpu=_cpu_rowwise, gpu="cast_rowwise", fake=_fake_rowwise, phase=CAST, layout=_rowwise
)
cast_blockwise = operation(
    _cast_blockwise, cpu=_cpu_blockwise, gpu="cast_blockwise", fake=_fake_blockwise, phase=CAST, layout=_of_blocks
)

CASTS = {
    ScalingGranularity.TENSORWISE: cast_tensorwise,
    ScalingGranularity.ROWWISE: cast_rowwise,
    ScalingGranularity.BLOCKWISE: cast_blockwise,
}
"""(hp, float8_dtype, row, column, power_of_2, *`CastConfig.options`) -> `Operands`."""


_ROWS_OF_A_RUN = 8


def _stored_tensorwise(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, mode: str = ""
) -> Operands:
    scales = scaling.scales_of(_amax(_by_rows(hp)), float8_dtype, power_of_2, mode or None)
    factor, divisor_of = scaling.factor_of(scales, mode)
    row_codes, column_codes = torch.ops.quaver.cast_with_scale(hp, float8_dtype, factor, factor, divisor_of)
    return of_one_scale(row_codes, column_codes, scales.quant, scales.dequant)


def _by_rows(hp: Tensor) -> Tensor:
    """The matrix [R, C], or the largest of each run of rows.

    Inductor reduces a matrix in runs of a power of two of elements. It merges this with the kernel that computes the
    matrix where runs are whole rows, as they are if C is a power of two. For another C the runs are made here, if R is
    known to be a multiple of theirs.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as compilers do

    rows, columns = hp.shape
    if statically_known_true(columns & (columns - 1) == 0) or not statically_known_true(rows % _ROWS_OF_A_RUN == 0):
        return hp
    return hp.reshape(rows // _ROWS_OF_A_RUN, -1).abs().amax(1)


CASTS_OF_STORED: dict[ScalingGranularity, Any] = {
    ScalingGranularity.TENSORWISE: _stored_tensorwise,
    ScalingGranularity.ROWWISE: returning_operands(torch.ops.quaver.cast_rowwise, _rowwise),
    ScalingGranularity.BLOCKWISE: returning_operands(torch.ops.quaver.cast_blockwise, _of_blocks),
}
"""As `CASTS`, by operations that store both layouts.

For compiled code, of a matrix that is in memory. The amax of a tensorwise cast is PyTorch's: Inductor finds it where
it computes the matrix.
"""


# ---- known scales ----------------------------------------------------------------------------------------------------


def _cast_with_scale(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    divisor_of: str = "",
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize with scales that are known.

    Args:
        row_scale: float32 () or [R, 1], the quant_scale of the row codes; None for no row codes.
        column_scale: float32 () or [1, C], that of the column codes; None for no column codes.
        divisor_of: as for `scaling.cast_to_float8`.
    Returns:
        Row codes, column codes.
    Raises:
        ValueError: hp is not of a high-precision dtype, as a weight whose `.data` was exchanged under compiled code.
    """
    scaling.check_hp(hp)
    cpu.check_memory(hp, row_scale, column_scale)
    row_codes = column_codes = None
    if row_scale is not None:
        row_codes = cast_row_codes(hp, row_scale, float8_dtype, False, divisor_of)
    if column_scale is not None:
        column_scale = column_scale if row_codes is None else apart(column_scale.clone(), row_codes)
        column_codes = cast_column_codes(hp, column_scale, float8_dtype, False, divisor_of)
    return row_codes, column_codes


def _cpu_with_scale(
    hp: Tensor,
    float8_dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    divisor_of: str = "",
) -> tuple[Tensor | None, ...] | None:
    made: list[Tensor | None] = []
    if not has_kernel(divisor_of):
        return None
    for scale in (row_scale, column_scale):
        if scale is not None and not scale.is_contiguous():
            cpu.check_memory(scale)
            scale = scale.contiguous()
        made.append(None if scale is None else cpu.cast_with_scale(hp, scale, float8_dtype, divides=bool(divisor_of)))
        if scale is not None and made[-1] is None:
            return None
    return tuple(made)


cast_with_scale = operation(_cast_with_scale, results=2, cpu=_cpu_with_scale, gpu="cast_with_scale", phase=CAST)


cast_blocks_with_scale = phase(CAST)(scaling.cast_blocks)
"""`scaling.cast_blocks`, for what was scaled before it is all-gathered."""


@phase("quaver::amax")
def matrix_amax(hp: Tensor, dim: int | None) -> Tensor:
    """`quaver.recipes.scaling.amax` of a matrix in float32, for amaxes that ranks reduce before they quantize.

    Under a dispatch mode it is PyTorch's, so that a selective-checkpoint policy can save the amax.
    """
    under_mode = torch.compiler.is_dynamo_compiling() or count_dispatch_modes() > 0
    triton_cast = None if under_mode else triton_kernels(hp)
    amax: Tensor | None = None if triton_cast is None else triton_cast.amax(hp, dim)
    return scaling.amax(hp, dim).float() if amax is None else amax


def _column_major_after(codes: Tensor, gradient: Tensor) -> Tensor:
    """A compiler may copy a graph's input in the forward and save the copy for backward.

    This copy also reads a gradient, so it is made in the backward. It is for codes that an all-gather or
    `cast_weights_once` quantized before the graph.
    """
    copy: Tensor = column_major(codes)
    return copy


column_major_after = operation(_column_major_after, results=1, in_graphs=True)
