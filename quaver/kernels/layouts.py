"""The casts of a matrix in the layouts that its matmuls read, from as few reads as arithmetic allows.

    row codes      float8 [R, C], contiguous              for a matmul that contracts C
    column codes   float8 [R, C], strides (1, R)          for a matmul that contracts R

A linear's operand enters two matmuls, which contract different dims, and a GPU multiplies float8 only along the
contiguous dim. So an operand is cast into both layouts, with one scale for both or with one a row and one a column:

                            scales of                 bytes that a GPU moves for a bfloat16 element
                                                      rows          columns       both
    cast_layouts            the matrix's amax         5, 2 reads    5, 2 reads    6, 2 reads
    cast_with_persistent_scale    an earlier amax           3, 1 read     3, 1 read     4, 1 read
    cast_axes               row and column amaxes     3, 1 read     5, 2 reads    6, 2 reads
    cast_with_scales        given                     3, 1 read     3, 1 read     4, 1 read

A kept scale that is not known yet costs one read more, and so do rows that are too wide for the chip (triton_rows.py).

Sums of the columns, for the gradient of a bias, come from the same reads.

quaver/scaling.py is the oracle, to the bit. It is also what runs, with a transpose, wherever Triton does not: for
anything but plain tensors on an NVIDIA GPU that rounds once. To a compiler each cast is one operation (layout_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.formats import HP_DTYPES, format_of
from quaver.kernels import layout_ops


class LayoutCast(NamedTuple):
    """The codes of a matrix [R, C] in the layouts that were wanted, with one scale."""

    row_codes: Tensor | None
    column_codes: Tensor | None
    """float8 [R, C]; see the top of the file."""
    quant_scale: Tensor
    dequant_scale: Tensor
    """float32 ()."""
    column_sums: Tensor | None
    """float32 [C], where wanted."""


class AxisCast(NamedTuple):
    """The codes of a matrix [R, C] for matmuls along one axis, with their scales."""

    codes: Tensor
    """float8 [R, C]: row codes or column codes."""
    quant_scale: Tensor
    dequant_scale: Tensor
    """float32: [R, 1] of row codes, [1, C] of column codes."""


class AxisCasts(NamedTuple):
    """The casts of a matrix [R, C] along the axes that were wanted."""

    rows: AxisCast | None
    columns: AxisCast | None
    column_sums: Tensor | None
    """float32 [C], where wanted."""


def cast_layouts(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
    column_sums: bool = False,
) -> LayoutCast:
    """`quaver.scaling.dynamic_cast` of the whole matrix.

    Args:
        hp: [R, C], float32, bfloat16 or float16.
        float8_dtype: what to cast to.
        rows, columns: which codes are wanted.
        power_of_2: round the scale down to a power of two.
        column_sums: add up the columns of hp too, in float32.
    Raises:
        ValueError: hp is no matrix or of another dtype, float8_dtype is none, or nothing is wanted.
    """
    _check(hp, float8_dtype, rows, columns)
    cast = torch.ops.quaver.cast_layouts if layout_ops.under_dispatch_mode() else layout_ops.cast_layouts
    return _layout_cast(cast(hp, float8_dtype, rows, columns, power_of_2, column_sums), rows, columns, column_sums)


def cast_with_persistent_scale(
    hp: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
    column_sums: bool = False,
) -> tuple[LayoutCast, Tensor]:
    """`quaver.scaling.cast_with_persistent_scale`, with a quant_scale () on hp's device; see `cast_layouts`.

    Returns:
        The cast, with the quant_scale that was used; and float32 [2]: hp's amax, and how many elements saturated.
    """
    _check(hp, float8_dtype, rows, columns)
    watched = layout_ops.under_dispatch_mode()
    cast = torch.ops.quaver.cast_layouts_with_persistent_scale if watched else layout_ops.cast_with_persistent_scale
    *made, observed = cast(hp, quant_scale, float8_dtype, rows, columns, power_of_2, column_sums)
    return _layout_cast(made, rows, columns, column_sums), observed


def cast_axes(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    power_of_2: bool = False,
    column_sums: bool = False,
) -> AxisCasts:
    """`quaver.scaling.dynamic_cast` along dim 1 for row codes and along dim 0 for column codes; see `cast_layouts`."""
    _check(hp, float8_dtype, rows, columns)
    cast = torch.ops.quaver.cast_axes if layout_ops.under_dispatch_mode() else layout_ops.cast_axes
    made = cast(hp, float8_dtype, rows, columns, power_of_2, column_sums)
    return AxisCasts(
        AxisCast(*made[0:3]) if rows else None,
        AxisCast(*made[3:6]) if columns else None,
        made[6] if column_sums else None,
    )


def cast_with_scales(
    hp: Tensor, float8_dtype: torch.dtype, *, row_scale: Tensor | None, column_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`quaver.scaling.cast_to_float8`: row codes with row_scale, column codes with column_scale, where given.

    Args:
        row_scale: float32, () or [R, 1]: quant_scales.
        column_scale: float32, () or [1, C].
    Raises:
        ValueError: as `cast_layouts`; or a scale has another shape.
    """
    rows, columns = row_scale is not None, column_scale is not None
    _check(hp, float8_dtype, rows, columns)
    _check_scale(row_scale, (hp.shape[0], 1))
    _check_scale(column_scale, (1, hp.shape[1]))
    cast = torch.ops.quaver.cast_with_scales if layout_ops.under_dispatch_mode() else layout_ops.cast_with_scales
    row_codes, column_codes = cast(hp, float8_dtype, row_scale, column_scale)
    return row_codes if rows else None, column_codes if columns else None


def _check(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool) -> None:
    if hp.dim() != 2 or hp.dtype not in HP_DTYPES:
        raise ValueError(
            f"expected a matrix of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype} of shape {list(hp.shape)}"
        )
    format_of(float8_dtype)
    if not (rows or columns):
        raise ValueError("expected row codes, column codes or both to be wanted, got neither")


def _check_scale(scale: Tensor | None, shape: tuple[int, int]) -> None:
    if scale is not None and (scale.dtype is not torch.float32 or (scale.dim() and scale.shape != shape)):
        raise ValueError(
            f"expected a float32 scale of shape () or {list(shape)}, got {scale.dtype} of {list(scale.shape)}"
        )


def _layout_cast(made: Sequence[Any], rows: bool, columns: bool, sums: bool) -> LayoutCast:
    row_codes, column_codes, quant, dequant, column_sums = made
    return LayoutCast(
        row_codes if rows else None,
        column_codes if columns else None,
        quant,
        dequant,
        column_sums if sums else None,
    )
