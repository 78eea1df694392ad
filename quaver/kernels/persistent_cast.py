"""Casts with the scale of an earlier step (delayed and static scaling), which also record the amax of the matrix.

                                  CPU            GPU       compiled for a GPU
    cast_with_persistent_scale    C extension    Triton    PyTorch; codes of a materialized matrix by an operation

A kernel checks on the device whether the scale is known, and if so reads the matrix once. Code compiled for a GPU reads
the matrix twice until the host knows it, too ([Note: known scales] in linear/scale_state.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.cast import (
    CAST_PHASE,
    cast_column_codes,
    cast_row_codes,
    cast_tensorwise,
    lay_out_codes,
    realize_scales,
)
from quaver.kernels.operands import Operand, Operands, pair_codes, select_directions
from quaver.kernels.operation import library, register_operation
from quaver.recipes import scaling
from quaver.recipes.scale_layout import TENSORWISE
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.compile_hints import wait_for_codes
from quaver.runtime.devices import is_cpu
from quaver.runtime.phases import phase


def _cast_with_persistent_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...]:
    """Return row codes, quant_scale, dequant_scale, column codes; float32 [2]: amax and saturated count."""
    cpu.check_memory(hp, quant_scale)
    codes, quant, dequant, recorded_amax = scaling.cast_with_persistent_scale(
        hp, quant_scale, float8_dtype, power_of_2=power_of_2
    )
    if is_cpu(codes):
        return codes, quant, dequant, None, recorded_amax
    row_codes, column_codes = lay_out_codes(codes, row, column)
    return row_codes, quant, dequant, column_codes, recorded_amax


def _cast_with_persistent_scale_cpu(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...] | None:
    recorded_amax = hp.new_zeros(2, dtype=torch.float32)
    result = cpu.cast_and_record_amax(hp, quant_scale, float8_dtype, power_of_2, recorded_amax)
    return None if result is None else (*result, None, recorded_amax)


def _cast_with_persistent_scale_fake(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...]:
    scaling.check_hp(hp)
    codes, recorded_amax = torch.empty_like(hp, dtype=float8_dtype), hp.new_empty(2, dtype=torch.float32)
    quant, dequant = torch.empty_like(quant_scale), torch.empty_like(quant_scale)
    if is_cpu(codes):
        return codes, quant, dequant, None, recorded_amax
    row_codes, column_codes = lay_out_codes(codes, row, column)
    return row_codes, quant, dequant, column_codes, recorded_amax


_run_persistent_cast = register_operation(
    _cast_with_persistent_scale,
    results=5,
    cpu=_cast_with_persistent_scale_cpu,
    fake=_cast_with_persistent_scale_fake,
    gpu="cast_with_persistent_scale",
)


@phase(CAST_PHASE)
def cast_with_persistent_scale(
    hp: Tensor,
    scale: PersistentScale,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    is_materialized: bool = False,
) -> Operands:
    """Quantize with a persistent scale, or with the scale of the matrix's amax if it is unknown.

    Updates `scale.amax_buffer` to the maximum of itself and the amax and saturated count of this cast, so a second
    call changes nothing. The scales of the operands are the scales that were used, float32 ().

    Args:
        is_materialized: whether hp is materialized in compiled code (`MATERIALIZED_CASTS`).
    """
    amax_buffer = scale.amax_buffer
    if hp.is_meta:  # a model on the meta device has scales on another device
        return cast_tensorwise(hp, float8_dtype, row, column, power_of_2, "")
    if torch.compiler.is_dynamo_compiling() and not is_cpu(hp):
        return _trace_persistent_cast(hp, scale, float8_dtype, row, column, power_of_2, is_materialized)
    if is_cpu(hp) and amax_buffer is not None and not torch.compiler.is_dynamo_compiling():
        result = cpu.cast_and_record_amax(hp, scale.quant_scale, float8_dtype, power_of_2, amax_buffer)
        if result is not None:  # C updated the buffer
            codes, quant, dequant = result
            return select_directions(Operand(codes, dequant, TENSORWISE, quant), row, column)
    row_codes, quant, dequant, column_codes, recorded_amax = _run_persistent_cast(
        hp, float8_dtype, row, column, power_of_2, scale.quant_scale
    )
    update_amax_buffer(scale, recorded_amax)
    if is_cpu(hp):
        return select_directions(Operand(row_codes, dequant, TENSORWISE, quant), row, column)
    return pair_codes(row_codes if row else None, column_codes if column else None, quant, dequant)


def _trace_persistent_cast(
    hp: Tensor,
    scale: PersistentScale,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    is_materialized: bool,
) -> Operands:
    """Run `cast_with_persistent_scale` in code compiled for a GPU.

    The codes under a known scale do not depend on the amax, but the returned scales do: Inductor then computes them in
    the kernel that updates the buffer. If a scale is wrongly assumed to be known, every result is inf or NaN.
    """
    cpu.check_memory(hp, scale.quant_scale)
    stored = scale.quant_scale
    amax, saturated = _compute_amax_and_saturated(
        hp, stored if scale.is_known_to_compiler else stored.clamp(min=0), float8_dtype
    )
    if scale.amax_buffer is not None:
        elements = scale.elements or scale.amax_buffer.unbind()
        for element, value in zip(elements, (amax, saturated), strict=True):
            element.copy_(torch.maximum(element, value.detach()))
    own_scale = (
        amax - amax
        if scale.is_known_to_compiler
        else scaling.amax_to_quant_scale(amax, float8_dtype, power_of_2=power_of_2)
    )
    quant = torch.where(stored > 0, stored, own_scale)
    quant, dequant, _ = realize_scales(scaling.CastScales(quant, scaling.to_dequant_scale(quant)))
    factor = stored if scale.is_known_to_compiler else quant
    if is_materialized and row and column:
        row_codes, column_codes = torch.ops.quaver.cast_with_scale(hp, float8_dtype, factor, factor, "")
        return pair_codes(row_codes, column_codes, quant, dequant)
    row_codes = cast_row_codes(hp, factor, float8_dtype) if row else None
    column_codes = None
    if column:
        column_codes = cast_column_codes(
            hp, factor if row_codes is None else wait_for_codes(quant, row_codes), float8_dtype
        )
    return pair_codes(row_codes, column_codes, quant, dequant)


_VALUES_PER_RUN = 4
"""The values of adjacent rows that `_compute_amax_and_saturated` reduces together."""


def _compute_amax_and_saturated(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the amax of a matrix, and how many elements saturate under a quant_scale; both float32 ().

    Rows are reduced first, so that Inductor fuses this into the kernel that computes the matrix. A row whose amax does
    not saturate counts 0. Counts therefore read the amaxes, and one more kernel reduces both over all rows. Inductor
    would split that kernel for more than 8,192 values, so a few rows are reduced together first.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as compilers do

    threshold = scaling.compute_saturation_threshold(float8_dtype)
    amaxes = scaling.compute_amax(hp, 1).float()
    counts = (scaling.apply_quant_scale(hp, quant_scale).abs() > threshold).sum(1, keepdim=True, dtype=torch.float32)
    counts = torch.where(amaxes * quant_scale <= threshold, 0.0, counts)
    rows = hp.shape[0]
    if statically_known_true(rows % _VALUES_PER_RUN == 0):
        runs = (rows // _VALUES_PER_RUN, _VALUES_PER_RUN)
        amaxes, counts = scaling.compute_amax(amaxes.view(runs), 1), counts.view(runs).sum(1)
    return scaling.compute_amax(amaxes), counts.sum()


def update_amax_buffer(scale: PersistentScale, recorded_amax: Tensor) -> None:
    """Update the amax buffer of a persistent scale to the maximum of itself and a `recorded_amax`, float32 [2]."""
    if scale.amax_buffer is None:
        return
    if torch.compiler.is_compiling():
        scale.amax_buffer.copy_(torch.maximum(scale.amax_buffer, recorded_amax.detach()))
    elif cpu.runs_directly():
        _update_amax_buffer(scale.amax_buffer, recorded_amax)
    else:
        torch.ops.quaver.update_amax_buffer(scale.amax_buffer, recorded_amax)


def record_amax(scale: PersistentScale, amax: Tensor) -> None:
    """Record the amax, float32 (), of a matrix that was scaled dynamically, with no saturated elements."""
    update_amax_buffer(scale, torch.stack([amax, torch.zeros_like(amax)]).to(scale.quant_scale.device))


def _update_amax_buffer(amax_buffer: Tensor, recorded_amax: Tensor) -> None:
    cpu.check_memory(amax_buffer, recorded_amax)
    torch.maximum(amax_buffer, recorded_amax.detach(), out=amax_buffer)  # make_fx drops a detach in the caller


# The operation returns nothing: a policy that saves all results would save the buffer, which the sync changes.
library.define("update_amax_buffer(Tensor(a!) amax_buffer, Tensor recorded_amax) -> ()")
library.impl("update_amax_buffer", _update_amax_buffer, "CompositeExplicitAutograd")
torch.library.register_fake("quaver::update_amax_buffer", lambda amax_buffer, recorded_amax: None, lib=library)
