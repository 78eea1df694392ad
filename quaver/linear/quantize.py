"""Quantizers: from one high-precision matrix to its float8 operands for its two matmuls.

A matrix enters two matmuls. One runs its dot products along the rows of the matrix, the other along its columns:

                 columns
             +-------------+
             | --------->  |     row operand       contracts the last dim
        rows | |           |                       of input and weight for output, of grad_output for grad_input
             | |           |     column operand    contracts the first dim
             | v           |                       of grad_output and input for grad_weight, of weight for grad_input
             +-------------+

    operands = quantizer(matrix, row=True, column=True)
    operands.row, operands.column

Row and column have this sense in every file, from config.py (`casts.weight.column`) to the kernels.

    rowwise         the row operand has a scale per row [rows, 1], the column operand a scale per column [1, columns]
    tensorwise      both operands have one scale, and on a CPU one set of codes
    blockwise       the two operands of a weight have one set of codes and scales
    disabled        the operand is the matrix itself, in high precision
    dequantized     both operands are the row operand, which gemm.py dequantizes for a matmul in high precision

Five quantizers share this interface, the last two in tensor_parallel_quantizer.py:

    Quantizer                   scales computed from the matrix, or persistent scales from an earlier step
    MaterializedQuantizer       the same, for a gradient, which is in memory when compiled code casts it
    CachedQuantizer             the same, for an activation that several linears read (shared_input.py)
    TensorParallelQuantizer     scales that agree across the ranks that hold parts of the matrix
    GatheringQuantizer          the same, and codes all-gathered from the ranks that hold other tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.cast import CASTS, MATERIALIZED_CASTS, cast_with_scale
from quaver.kernels.operands import Operand, Operands, pair_codes, select_directions
from quaver.kernels.persistent_cast import cast_with_persistent_scale
from quaver.recipes.config import CastConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import TENSORWISE
from quaver.recipes.scaling import CastScales, PersistentScale, choose_factor, to_dequant_scale
from quaver.runtime.devices import is_cpu


class Quantizer:
    """Quantizes one operand of a linear.

    Args:
        casts: the casts in both directions.
        hp_dtype: the dtype of an operand whose cast is disabled.
        scale: the persistent scale, if the casts have one.
    """

    __slots__ = ("casts", "hp_dtype", "scale")

    def __init__(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None = None) -> None:
        self.casts, self.hp_dtype, self.scale = casts, hp_dtype, scale

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None = None) -> Operands:
        """Quantize `hp` for one or both of its matmuls.

        Args:
            hp: [..., columns], float32, bfloat16 or float16; leading dims are rows.
            row, column: which operands to make.
            scales: from `derive_scales`, after an earlier cast of the same matrix.
        """
        if not (row or column):
            return Operands(None, None)
        casts, hp = self.casts, flatten_to_matrix(hp)
        if casts.is_dequantized:
            operand = self.apply_cast(casts.row, hp, row=True, column=False, scales=scales).row
            return Operands(operand, operand)
        if casts.has_equal_casts or not (row and column):
            return self.apply_cast(casts.row if row else casts.column, hp, row=row, column=column, scales=scales)
        # A rowwise cast runs first: its scales determine a tensorwise scale without another read.
        columns_first = casts.column.is_rowwise
        earlier, later = (casts.column, casts.row) if columns_first else (casts.row, casts.column)
        first = self.apply_cast(earlier, hp, row=not columns_first, column=columns_first, scales=scales)
        scales = scales or self.derive_scales(later, first)
        second = self.apply_cast(later, hp, row=columns_first, column=not columns_first, scales=scales)
        return Operands(first.row or second.row, first.column or second.column)

    def apply_cast(
        self, cast: CastConfig, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None
    ) -> Operands:
        """Quantize `hp` [rows, columns] with one cast."""
        if cast.is_disabled:
            converted = Operand(hp if hp.dtype is self.hp_dtype else hp.to(self.hp_dtype))
            return Operands(converted if row else None, converted if column else None)
        float8_dtype, power_of_2 = cast.float8_dtype, self.casts.power_of_2
        if cast.is_tensorwise and scales is not None:
            quant, dequant, _ = scales
            factor = choose_factor(scales, cast.rule)
            if is_cpu(hp):  # one set of codes serves both
                codes, _ = cast_with_scale(hp, float8_dtype, factor, None, cast.rule)
                return select_directions(Operand(codes, dequant, TENSORWISE, quant), row, column)
            factors = factor if row else None, factor if column else None
            codes = cast_with_scale(hp, float8_dtype, *factors, cast.rule)
            return pair_codes(codes[0] if row else None, codes[1] if column else None, quant, dequant)
        if cast.is_persistent and self.scale is not None:
            return cast_with_persistent_scale(hp, self.scale, float8_dtype, row, column, power_of_2)
        # Only weights, which are in memory, have square blocks.
        is_weight = cast.is_blockwise and not cast.depends_on_direction
        casts = MATERIALIZED_CASTS if is_weight and torch.compiler.is_dynamo_compiling() and not is_cpu(hp) else CASTS
        return casts[cast.scaling_granularity](hp, float8_dtype, row, column, power_of_2, *cast.trailing_arguments)

    def derive_scales(self, cast: CastConfig, operands: Operands) -> CastScales | None:
        """Return the scales of a tensorwise `cast` of a matrix that has `operands`, without another read.

        After a rowwise cast the quant_scale is the smallest one: a scale decreases as its amax grows, rounding
        included, and is NaN where an amax is. None for another cast, across different rules of scales, and after a
        blockwise cast, in which a block of zeros has quant_scale 1.
        """
        operand, casts = operands.row or operands.column, self.casts
        if not casts.has_equal_casts and (casts.row.scale_rule or casts.column.scale_rule):
            return None
        if operand is None or operand.quant_scale is None or operand.dequant_scale is None:
            return None
        if not cast.is_tensorwise or operand.layout.is_blockwise:
            return None
        if operand.quant_scale.dim() == 0:
            return CastScales(operand.quant_scale, operand.dequant_scale)
        if not operand.quant_scale.numel():
            return None
        quant = operand.quant_scale.min()
        return CastScales(quant, to_dequant_scale(quant))


class MaterializedQuantizer(Quantizer):
    """Quantizes a gradient for both of its matmuls in one operation, in code compiled for a GPU.

    The gradient is in memory, and Inductor would read it once per layout. Activations keep `Quantizer`, so that
    Inductor can fuse their cast with their producer, such as a norm.
    """

    __slots__ = ()

    def apply_cast(
        self, cast: CastConfig, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None
    ) -> Operands:
        cast_materialized = None if cast.is_disabled else MATERIALIZED_CASTS.get(cast.scaling_granularity)
        if cast_materialized is None or not (row and column and torch.compiler.is_dynamo_compiling()) or is_cpu(hp):
            return super().apply_cast(cast, hp, row=row, column=column, scales=scales)
        if cast.is_persistent and self.scale is not None:
            return cast_with_persistent_scale(
                hp, self.scale, cast.float8_dtype, row, column, self.casts.power_of_2, True
            )
        return cast_materialized(hp, cast.float8_dtype, row, column, self.casts.power_of_2, *cast.trailing_arguments)


def flatten_to_matrix(hp: Tensor) -> Tensor:
    """Return [..., columns] as a contiguous [rows, columns]."""
    return (hp if hp.dim() == 2 else hp.reshape(-1, hp.shape[-1])).contiguous()
