"""Casts with the scale of an earlier step (delayed and static scaling), which also record the amax of the matrix.

                                  CPU            GPU       compiled for a GPU
    cast_with_persistent_scale    C extension    Triton    PyTorch; of a matrix that is in memory, codes by an operation

A kernel finds out on the device whether the scale is known, so that it has to read the matrix once. Code compiled for a
GPU reads it twice until the host knows that ([Note: known scales] in linear/scale_state.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.cast import CAST, cast_column_codes, cast_row_codes, cast_tensorwise, computed_once, in_layouts
from quaver.kernels.operands import Operand, Operands, asked_for, of_one_scale
from quaver.kernels.operation import library, operation
from quaver.recipes import scaling
from quaver.recipes.scale_layout import TENSORWISE
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.compile_hints import apart
from quaver.runtime.devices import is_cpu
from quaver.runtime.phases import phase


def _cast_with_persistent_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...]:
    """Row codes, quant_scale, dequant_scale, column codes; float32 [2]: the amax, and how many elements saturated."""
    cpu.check_memory(hp, quant_scale)
    codes, quant, dequant, observed = scaling.cast_with_persistent_scale(
        hp, quant_scale, float8_dtype, power_of_2=power_of_2
    )
    if is_cpu(codes):
        return codes, quant, dequant, None, observed
    row_codes, column_codes = in_layouts(codes, row, column)
    return row_codes, quant, dequant, column_codes, observed


def _cpu_with_persistent_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, power_of_2: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...] | None:
    observed = hp.new_zeros(2, dtype=torch.float32)
    made = cpu.cast_and_observe(hp, quant_scale, float8_dtype, power_of_2, observed)
    return None if made is None else (*made, None, observed)


def _fake_with_persistent_scale(
    hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool, _: bool, quant_scale: Tensor
) -> tuple[Tensor | None, ...]:
    scaling.check_hp(hp)
    codes, observed = torch.empty_like(hp, dtype=float8_dtype), hp.new_empty(2, dtype=torch.float32)
    quant, dequant = torch.empty_like(quant_scale), torch.empty_like(quant_scale)
    if is_cpu(codes):
        return codes, quant, dequant, None, observed
    row_codes, column_codes = in_layouts(codes, row, column)
    return row_codes, quant, dequant, column_codes, observed


_persistent = operation(
    _cast_with_persistent_scale,
    results=5,
    cpu=_cpu_with_persistent_scale,
    fake=_fake_with_persistent_scale,
    gpu="cast_with_persistent_scale",
)


@phase(CAST)
def cast_with_persistent_scale(
    hp: Tensor,
    scale: PersistentScale,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    is_stored: bool = False,
) -> Operands:
    """Quantize with a persistent scale, or with that of the matrix's amax while it is not initialized.

    Updates `scale.amax_buffer` with the amax and the number of saturated elements by a maximum, so repeating the cast
    changes nothing. The scales of the operands are those that were used, float32 ().

    Args:
        is_stored: that hp is in memory, for compiled code (`CASTS_OF_STORED`).
    """
    amax_buffer = scale.amax_buffer
    if hp.is_meta:  # the scales of a model on the meta device stay where they are
        return cast_tensorwise(hp, float8_dtype, row, column, power_of_2)
    if torch.compiler.is_dynamo_compiling() and not is_cpu(hp):
        return _traced_with_persistent_scale(hp, scale, float8_dtype, row, column, power_of_2, is_stored)
    if is_cpu(hp) and amax_buffer is not None and not torch.compiler.is_dynamo_compiling():
        made = cpu.cast_and_observe(hp, scale.quant_scale, float8_dtype, power_of_2, amax_buffer)
        if made is not None:  # C updated the buffer
            return asked_for(Operand(made[0], made[2], TENSORWISE, made[1]), row, column)
    row_codes, quant, dequant, column_codes, observed = _persistent(
        hp, float8_dtype, row, column, power_of_2, scale.quant_scale
    )
    record(scale, observed)
    if is_cpu(hp):
        return asked_for(Operand(row_codes, dequant, TENSORWISE, quant), row, column)
    return of_one_scale(row_codes if row else None, column_codes if column else None, quant, dequant)


def _traced_with_persistent_scale(
    hp: Tensor,
    scale: PersistentScale,
    float8_dtype: torch.dtype,
    row: bool,
    column: bool,
    power_of_2: bool,
    is_stored: bool,
) -> Operands:
    """`cast_with_persistent_scale` for code compiled for a GPU.

    A cast with a known scale does not wait for the amax. The scales of the operands do: Inductor then computes them
    where it updates the buffer, and a `scale` that is known by mistake makes every result inf or NaN.
    """
    cpu.check_memory(hp, scale.quant_scale)
    given = scale.quant_scale
    largest, saturated = _observe(hp, given if scale.is_known else given.clamp(min=0), float8_dtype)
    if scale.amax_buffer is not None:
        elements = scale.elements or scale.amax_buffer.unbind()
        for element, observed in zip(elements, (largest, saturated), strict=True):
            element.copy_(torch.maximum(element, observed.detach()))
    if scale.is_known:
        own = largest - largest
    else:
        own = scaling.amax_to_quant_scale(largest, float8_dtype, power_of_2=power_of_2)
    used = torch.where(given > 0, given, own)
    quant, dequant, _ = computed_once(scaling.Scales(used, scaling.to_dequant_scale(used)))
    known = given if scale.is_known else quant
    if is_stored and row and column:
        row_codes, column_codes = torch.ops.quaver.cast_with_scale(hp, float8_dtype, known, known)
        return of_one_scale(row_codes, column_codes, quant, dequant)
    row_codes = cast_row_codes(hp, known, float8_dtype) if row else None
    column_codes = None
    if column:
        column_codes = cast_column_codes(hp, known if row_codes is None else apart(quant, row_codes), float8_dtype)
    return of_one_scale(row_codes, column_codes, quant, dequant)


_ROWS_AT_ONCE = 4


def _observe(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The amax of a matrix, and how many elements saturate under a quant_scale; both float32 ().

    Each row by itself first, so that Inductor merges this with the kernel that computes the matrix. One kernel reduces
    both of all rows, because the counts read the amaxes: where the largest does not saturate, none does. Inductor would
    divide it for more than 8,192 values, so each reads a few rows.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as compilers do

    above = scaling.saturates_above(float8_dtype)
    amaxes = scaling.amax(hp, 1).float()
    counts = (scaling.multiply(hp, quant_scale).abs() > above).sum(1, keepdim=True, dtype=torch.float32)
    counts = torch.where(amaxes * quant_scale <= above, 0.0, counts)
    rows = hp.shape[0]
    if statically_known_true(rows % _ROWS_AT_ONCE == 0):
        by_rows = (rows // _ROWS_AT_ONCE, _ROWS_AT_ONCE)
        amaxes, counts = scaling.amax(amaxes.view(by_rows), 1), counts.view(by_rows).sum(1)
    return scaling.amax(amaxes), counts.sum()


def record(scale: PersistentScale, observed: Tensor) -> None:
    """Update the amax buffer of a persistent scale with what one cast observed (float32 [2]), by a maximum."""
    if scale.amax_buffer is None:
        return
    if torch.compiler.is_compiling():
        scale.amax_buffer.copy_(torch.maximum(scale.amax_buffer, observed.detach()))
    elif cpu.runs_directly():
        _update_amax_buffer(scale.amax_buffer, observed)
    else:
        torch.ops.quaver.update_amax_buffer(scale.amax_buffer, observed)


def record_amax(scale: PersistentScale, amax: Tensor) -> None:
    """Record the amax, float32 (), of a matrix that was scaled dynamically, so that nothing saturated."""
    record(scale, torch.stack([amax, torch.zeros_like(amax)]).to(scale.quant_scale.device))


def _update_amax_buffer(amax_buffer: Tensor, observed: Tensor) -> None:
    cpu.check_memory(amax_buffer, observed)
    torch.maximum(amax_buffer, observed.detach(), out=amax_buffer)  # make_fx drops the detach of a caller


# An operation without a result: a policy that saves every result would save the buffer, which the sync changes.
library.define("update_amax_buffer(Tensor(a!) amax_buffer, Tensor observed) -> ()")
library.impl("update_amax_buffer", _update_amax_buffer, "CompositeExplicitAutograd")
torch.library.register_fake("quaver::update_amax_buffer", lambda amax_buffer, observed: None, lib=library)
