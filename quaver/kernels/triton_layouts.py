"""Which kernels make which casts, on an NVIDIA GPU: the four casts of layouts.py, in the fewest reads.

Every function takes a matrix hp [R, C] that is not empty and that `triton_blocks.takes` accepts, and returns None for
what is not wanted. Nothing waits for the device, and a CUDA graph can capture a call once a first one has compiled the
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels import triton_cast, triton_reduce, triton_rows
from quaver.kernels.triton_axes import CastAxes
from quaver.kernels.triton_axes import cast_axes as cast_axes_in_tiles
from quaver.kernels.triton_tiles import cast_tiles

Made = tuple[Tensor | None, ...]


def cast_layouts(
    hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale, column sums."""
    if not (columns or sums):
        codes, quant, dequant = triton_cast.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
        return codes, None, quant, dequant, None
    observed = triton_cast.amax_unless_known(hp, None)
    return _in_tiles(hp, None, observed, float8_dtype, rows, columns, power_of_2, sums)


def cast_with_persistent_scale(
    hp: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
    sums: bool,
) -> Made:
    """Row codes, column codes, quant_scale, dequant_scale, column sums, and what was observed."""
    if not (columns or sums):
        codes, quant, dequant, observed = triton_cast.cast_with_persistent_scale(
            hp, quant_scale, float8_dtype, power_of_2=power_of_2
        )
        return codes, None, quant, dequant, None, observed
    observed = triton_cast.amax_unless_known(hp, quant_scale)
    return (*_in_tiles(hp, quant_scale, observed, float8_dtype, rows, columns, power_of_2, sums), observed)


def _in_tiles(
    hp: Tensor,
    quant_scale: Tensor | None,
    observed: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
    sums: bool,
) -> Made:
    made = cast_tiles(
        hp,
        float8_dtype,
        rows=rows,
        columns=columns,
        quant_scale=quant_scale,
        observed=observed,
        power_of_2=power_of_2,
        sums=sums,
    )
    return (*made[:4], _added(made.partial_sums))


def cast_axes(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool) -> Made:
    """Codes, quant_scale and dequant_scale of rows, then of columns; column sums."""
    if not columns and triton_rows.fits(hp, sums=sums):
        *of_rows, partial_sums = triton_rows.cast_rows(hp, float8_dtype, power_of_2=power_of_2, sums=sums)
        return (*of_rows, None, None, None, _added(partial_sums))
    row_amax, column_amax = triton_reduce.axis_amaxes(hp, rows=rows, columns=columns)
    made: CastAxes = cast_axes_in_tiles(
        hp,
        float8_dtype,
        row_scales=row_amax,
        column_scales=column_amax,
        given=False,
        power_of_2=power_of_2,
        sums=sums,
    )
    return (*made[:6], _added(made.partial_sums))


def cast_with_scales(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> Made:
    """Row codes, column codes."""
    made = cast_axes_in_tiles(
        hp,
        float8_dtype,
        row_scales=None if row_scale is None else row_scale.contiguous(),
        column_scales=None if column_scale is None else column_scale.contiguous(),
        given=True,
    )
    return made.row_codes, made.column_codes


def _added(partial_sums: Tensor | None) -> Tensor | None:
    return None if partial_sums is None else triton_reduce.add_partials(partial_sums)
