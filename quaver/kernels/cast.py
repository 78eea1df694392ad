"""The dispatch table of the casts to float8: device x granularity x directions. scaling.py is the oracle, to the bit.

A matrix [R, C] is an operand of two matmuls. `rows` asks for codes for the one that contracts the last dim, `columns`
for codes for the one that contracts the first.

                                  scales from                       CPU            GPU       compiled for a GPU
    cast_tensorwise               the amax of the matrix            C extension    Triton    PyTorch
    cast_rowwise                  the amaxes of rows, of columns    C extension    Triton    PyTorch
    cast_blockwise                the amaxes of blocks              PyTorch        PyTorch   PyTorch
    cast_with_scale               the caller                        C extension    Triton    PyTorch
    cast_with_persistent_scale    an earlier step                   C extension    Triton    the operation

What the C extension or Triton does not take (other dtypes, strides, devices) runs in PyTorch.

Layouts. A GPU multiplies float8 only along the contiguous dim: there, row codes are contiguous and column codes have
strides (1, R). A CPU takes any layout: there, codes are contiguous, and tensorwise row codes serve both matmuls. Block
codes are contiguous everywhere, because the matmul that reads them takes any layout.

[Note: casts are operations] Each cast is a registered operation. Eager code on plain tensors calls the implementation
directly, which spares the dispatcher. Under a dispatch mode, on a fake tensor and on any other subclass it calls the
operation, so that a mode sees one operation whatever runs below it, and only the implementation reads memory.

[Note: compiled code] On a CPU a cast stays one operation: compiled C++ casts along columns slowly, and the operation
reads the tensor that eager code reads, so codes are eager's even where Inductor keeps the producer's float32. On a GPU
Inductor is given PyTorch, which it fuses with the producer of the matrix. A cast with a persistent scale is one
operation on every device: only a kernel can find out on the device that it has to read the matrix twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver import scaling
from quaver.kernels import cpu
from quaver.kernels.cpu import check_memory as _check_memory
from quaver.phases import phase
from quaver.scaling import PLAIN_TYPES, PersistentScale
from quaver.slow_paths import say_once

Codes = tuple[Tensor | None, Tensor | None]
"""Row codes and column codes, float8 [R, C]; None for what was not asked for."""

Made = tuple[Any, ...]
"""Tensors; None for what was not asked for."""


def under_dispatch_mode() -> bool:
    """Whether Dynamo traces, or a dispatch mode (selective checkpointing, fake tensors, a recorder) sees operations."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def runs_as_operation(hp: Tensor) -> bool:
    """Whether a cast of `hp` must be the registered operation; see the notes at the top."""
    if torch.compiler.is_dynamo_compiling():
        return hp.is_cpu
    return not cpu.runs_directly() or type(hp) not in PLAIN_TYPES


def _triton(hp: Tensor, float8_dtype: torch.dtype) -> Any:
    """The module of the Triton kernels if they take `hp`, else None."""
    if not hp.is_cuda or torch.compiler.is_dynamo_compiling():
        return None
    from quaver.kernels import triton_blocks, triton_cast  # import triton, which PyTorch for CPUs comes without

    if triton_blocks.UNAVAILABLE_BECAUSE is not None:
        say_once(
            "casts without Triton",
            "float8 casts on the GPU run in PyTorch, in several passes over memory, because Triton cannot be imported: "
            f"{triton_blocks.UNAVAILABLE_BECAUSE}",
        )
    return triton_cast if triton_cast.takes(hp, float8_dtype) else None


# ---- the casts -------------------------------------------------------------------------------------------------------


@phase("quaver::cast")
def cast_tensorwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    """Quantize with the scale of the matrix's own amax.

    Args:
        hp: [R, C], float32, bfloat16 or float16.
        float8_dtype: the dtype of the codes.
        rows, columns: which codes to make. On a CPU ask for one of them, which serves both matmuls.
        power_of_2: round the scale down to a power of two.
    Returns:
        Row codes, column codes, quant_scale and dequant_scale, float32 ().
    """
    if runs_as_operation(hp):
        *codes, quant, dequant = torch.ops.quaver.cast_tensorwise(hp, float8_dtype, rows, columns, power_of_2)
        return *_wanted(codes, rows, columns), quant, dequant
    return _cast_tensorwise(hp, float8_dtype, rows, columns, power_of_2)


@phase("quaver::cast")
def cast_rowwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    """Quantize each row (for row codes) and each column (for column codes) with the scale of its amax.

    Returns:
        Row codes with their quant_scale and dequant_scale, float32 [R, 1]; column codes with theirs, float32 [1, C].
        See `cast_tensorwise` for the arguments.
    """
    if runs_as_operation(hp):
        made = torch.ops.quaver.cast_rowwise(hp, float8_dtype, rows, columns, power_of_2)
        return *(made[:3] if rows else _NOTHING), *(made[3:] if columns else _NOTHING)
    return _cast_rowwise(hp, float8_dtype, rows, columns, power_of_2)


@phase("quaver::cast")
def cast_blockwise(hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Made:
    """Quantize blocks of 128 x 128 with the scales of their own amaxes; the codes serve both matmuls.

    Returns:
        Codes [R, C], quant_scale and dequant_scale, float32 [ceil(R / 128), ceil(C / 128)].
    """
    if runs_as_operation(hp):
        return tuple(torch.ops.quaver.cast_blockwise(hp, float8_dtype, power_of_2))
    return _cast_blockwise(hp, float8_dtype, power_of_2)


@phase("quaver::cast")
def cast_with_scale(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> Codes:
    """Quantize with scales that are known.

    Args:
        row_scale: float32 () or [R, 1], the quant_scale of the row codes; None for no row codes.
        column_scale: float32 () or [1, C], that of the column codes; None for no column codes.
    Returns:
        Row codes, column codes.
    """
    if runs_as_operation(hp):
        codes = torch.ops.quaver.cast_with_scale(hp, float8_dtype, row_scale, column_scale)
        return _wanted(codes, row_scale is not None, column_scale is not None)
    return _cast_with_scale(hp, float8_dtype, row_scale, column_scale)


@phase("quaver::cast")
def cast_with_persistent_scale(
    hp: Tensor, scale: PersistentScale, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool
) -> Made:
    """Quantize with a persistent scale, or with that of the matrix's amax while it is not initialized.

    Updates `scale.amax_buffer` with the amax and the number of saturated elements by a maximum, so repeating the cast
    changes nothing.

    Returns:
        Row codes, column codes, the quant_scale and dequant_scale that were used, float32 ().
    """
    quant_scale, amax_buffer = scale.quant_scale, scale.amax_buffer
    if hp.is_meta:  # the scales of a model on the meta device stay where they are
        return _fake_tensorwise(hp, float8_dtype, rows, columns, power_of_2)
    if torch.compiler.is_dynamo_compiling() or runs_as_operation(hp):
        *codes, quant, dequant, observed = torch.ops.quaver.cast_with_persistent_scale(
            hp, quant_scale, float8_dtype, rows, columns, power_of_2
        )
        row_codes, column_codes = _wanted(codes, rows, columns)
    else:
        if hp.is_cpu and amax_buffer is not None:  # C updates the buffer itself
            made = cpu.cast_and_observe(hp, quant_scale, float8_dtype, power_of_2, amax_buffer)
            if made is not None:
                return *_laid_out(made[0], rows, columns), *made[1:]
        row_codes, column_codes, quant, dequant, observed = _cast_with_persistent_scale(
            hp, quant_scale, float8_dtype, rows, columns, power_of_2
        )
    record(scale, observed)
    return row_codes, column_codes, quant, dequant


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


@phase("quaver::amax")
def matrix_amax(hp: Tensor, dim: int | None) -> Tensor:
    """`quaver.scaling.amax` of a matrix in float32, for amaxes that ranks reduce before they quantize.

    Under a dispatch mode it is PyTorch's, so that a selective-checkpoint policy can save the amax.
    """
    triton_cast = None if under_dispatch_mode() else _triton(hp, torch.float8_e4m3fn)
    amax: Tensor = scaling.amax(hp, dim).float() if triton_cast is None else triton_cast.amax(hp, dim)
    return amax


def _update_amax_buffer(amax_buffer: Tensor, observed: Tensor) -> None:
    _check_memory(amax_buffer, observed)
    torch.maximum(amax_buffer, observed.detach(), out=amax_buffer)  # make_fx drops the detach of a caller


# ---- the implementations ---------------------------------------------------------------------------------------------

_NOTHING = (None, None, None)
_amax = phase("quaver::amax")(scaling.amax)


def _cast_tensorwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    made = cpu.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2) if hp.is_cpu else None
    if made is not None:
        return *_laid_out(made[0], rows, columns), *made[1:]
    triton_cast = _triton(hp, float8_dtype)
    if triton_cast is not None:
        return triton_cast.cast_tensorwise(hp, float8_dtype, rows, columns, power_of_2)
    codes, quant, dequant = _dynamic_cast(hp, float8_dtype, None, power_of_2)
    return *_laid_out(codes, rows, columns), quant, dequant


def _cast_rowwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    if hp.is_cpu and rows and columns:
        both = cpu.dynamic_cast_axes(hp, float8_dtype, power_of_2=power_of_2)
        if both is not None:
            return both
    elif hp.is_cpu:
        made = cpu.dynamic_cast(hp, float8_dtype, 1 if rows else 0, power_of_2=power_of_2)
        if made is not None:
            return (*made, *_NOTHING) if rows else (*_NOTHING, *made)
    triton_cast = _triton(hp, float8_dtype)
    if triton_cast is not None:
        return triton_cast.cast_rowwise(hp, float8_dtype, rows, columns, power_of_2)
    of_rows = _by_dim(hp, float8_dtype, 1, power_of_2) if rows else _NOTHING
    of_columns = _by_dim(hp, float8_dtype, 0, power_of_2) if columns else _NOTHING
    return *of_rows, *of_columns


def _by_dim(hp: Tensor, float8_dtype: torch.dtype, dim: int, power_of_2: bool) -> Made:
    codes, *scales = _dynamic_cast(hp, float8_dtype, dim, power_of_2)
    return _laid_out(codes, dim == 1, dim == 0)[1 - dim], *scales


def _cast_blockwise(hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Made:
    _check_memory(hp)
    return scaling.dynamic_cast_blocks(hp, float8_dtype, power_of_2=power_of_2)


def _dynamic_cast(hp: Tensor, float8_dtype: torch.dtype, dim: int | None, power_of_2: bool) -> Made:
    """`scaling.dynamic_cast`, with its amax as a phase of its own."""
    _check_memory(hp)
    quant = scaling.amax_to_quant_scale(_amax(hp, dim), float8_dtype, power_of_2=power_of_2)
    return scaling.cast_to_float8(hp, quant, float8_dtype), quant, scaling.to_dequant_scale(quant)


def _cast_with_scale(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> Codes:
    triton_cast = _triton(hp, float8_dtype)
    if triton_cast is not None:
        codes: Codes = triton_cast.cast_with_scale(hp, float8_dtype, row_scale, column_scale)
        return codes
    row_codes = column_codes = None
    if row_scale is not None:
        row_codes = _laid_out(_scaled(hp, row_scale, float8_dtype), True, False)[0]
    if column_scale is not None:
        column_codes = _laid_out(_scaled(hp, column_scale, float8_dtype), False, True)[1]
    return row_codes, column_codes


def _scaled(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    if not quant_scale.is_contiguous():
        _check_memory(quant_scale)
        quant_scale = quant_scale.contiguous()
    codes = cpu.cast_with_scale(hp, quant_scale, float8_dtype) if hp.is_cpu else None
    if codes is not None:
        return codes
    _check_memory(hp, quant_scale)
    return scaling.cast_to_float8(hp, quant_scale, float8_dtype)


def _cast_with_persistent_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool
) -> Made:
    """Also returns what was observed, float32 [2]: the amax, and the number of saturated elements."""
    if hp.is_cpu:
        observed = hp.new_zeros(2, dtype=torch.float32)
        in_c = cpu.cast_and_observe(hp, quant_scale, float8_dtype, power_of_2, observed)
        if in_c is not None:
            return *_laid_out(in_c[0], rows, columns), *in_c[1:], observed
    triton_cast = _triton(hp, float8_dtype)
    if triton_cast is not None:
        return triton_cast.cast_with_persistent_scale(hp, quant_scale, float8_dtype, rows, columns, power_of_2)
    _check_memory(hp, quant_scale)
    codes, *made = scaling.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    return *_laid_out(codes, rows, columns), *made


def _laid_out(codes: Tensor, rows: bool, columns: bool) -> Codes:
    """`codes` in the layouts of the device; an operation must not return one tensor twice."""
    if codes.is_cpu:
        return codes if rows else None, None if rows else codes
    return codes.contiguous() if rows else None, column_major(codes) if columns else None


def column_major(codes: Tensor) -> Tensor:
    """A copy of `codes` [R, C] with strides (1, R)."""
    return codes.new_empty(codes.shape[1], codes.shape[0]).copy_(codes.t()).t()


def _wanted(codes: Any, rows: bool, columns: bool) -> Codes:
    return codes[0] if rows else None, codes[1] if columns else None


# ---- as operations: they return tensors only, empty ones for what was not asked for ---------------------------------

_library = torch.library.Library("quaver", "FRAGMENT")


def _define(name: str, arguments: str, results: int, cast: Callable[..., Made], fake: Callable[..., Made]) -> None:
    def tensors(function: Callable[..., Made]) -> Callable[..., tuple[Tensor, ...]]:
        def run(hp: Tensor, *args: Any) -> tuple[Tensor, ...]:
            if function is not fake:
                _check_memory(hp)
                hp = hp.contiguous()
            made = function(hp, *args)
            return tuple(hp.new_empty(0) if each is None else each for each in made)

        return run

    _library.define(f"{name}(Tensor hp, {arguments}) -> ({', '.join(['Tensor'] * results)})")
    _library.impl(name, tensors(cast), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{name}", tensors(fake), lib=_library)


def _fake_codes(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool) -> Codes:
    size = hp.shape
    row_codes = hp.new_empty(size, dtype=float8_dtype) if rows else None
    if not columns or (rows and hp.is_cpu):
        return row_codes, None
    if hp.is_cpu:
        return None, hp.new_empty(size, dtype=float8_dtype)
    return row_codes, hp.new_empty((size[1], size[0]), dtype=float8_dtype).t()


def _fake_tensorwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    scales = (hp.new_empty((), dtype=torch.float32) for _ in range(2))
    return *_fake_codes(hp, float8_dtype, rows, columns), *scales


def _fake_rowwise(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool) -> Made:
    made: list[Tensor | None] = []
    for dim, wanted in ((1, rows), (0, columns)):
        size = (hp.shape[0], 1) if dim == 1 else (1, hp.shape[1])
        codes = _fake_codes(hp, float8_dtype, dim == 1, dim == 0)[1 - dim] if wanted else None
        made += [codes, *(hp.new_empty(size, dtype=torch.float32) if wanted else None for _ in range(2))]
    return tuple(made)


def _fake_blockwise(hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Made:
    scales = (hp.new_empty(scaling.block_counts(*hp.shape), dtype=torch.float32) for _ in range(2))
    return hp.new_empty(hp.shape, dtype=float8_dtype), *scales


def _fake_with_scale(hp: Tensor, float8_dtype: torch.dtype, row_scale: Any, column_scale: Any) -> Made:
    rows = _fake_codes(hp, float8_dtype, row_scale is not None, False)[0]
    return rows, _fake_codes(hp, float8_dtype, False, column_scale is not None)[1]


def _fake_with_persistent_scale(hp: Tensor, quant_scale: Tensor, *args: Any) -> Made:
    return *_fake_tensorwise(hp, *args), hp.new_empty(2, dtype=torch.float32)


_WANTED = "ScalarType float8_dtype, bool rows, bool columns, bool power_of_2"
_define("cast_tensorwise", _WANTED, 4, _cast_tensorwise, _fake_tensorwise)
_define("cast_rowwise", _WANTED, 6, _cast_rowwise, _fake_rowwise)
_define("cast_blockwise", "ScalarType float8_dtype, bool power_of_2", 3, _cast_blockwise, _fake_blockwise)
_define(
    "cast_with_scale",
    "ScalarType float8_dtype, Tensor? row_scale, Tensor? column_scale",
    2,
    _cast_with_scale,
    _fake_with_scale,
)
_define(
    "cast_with_persistent_scale",
    f"Tensor quant_scale, {_WANTED}",
    5,
    _cast_with_persistent_scale,
    _fake_with_persistent_scale,
)
# An operation without a result: a policy that saves every result would save the buffer, which the sync changes.
_library.define("update_amax_buffer(Tensor(a!) amax_buffer, Tensor observed) -> ()")
_library.impl("update_amax_buffer", _update_amax_buffer, "CompositeExplicitAutograd")
torch.library.register_fake("quaver::update_amax_buffer", lambda amax_buffer, observed: None, lib=_library)
# A compiler may copy a graph's input in the forward and save the copy for backward. This copy also reads a gradient,
# so it is made in the backward. It is for codes that an all-gather or `cast_weights_once` quantized before the graph.
_library.define("column_major_after(Tensor codes, Tensor gradient) -> Tensor")
_library.impl("column_major_after", lambda codes, gradient: column_major(codes), "CompositeExplicitAutograd")
torch.library.register_fake(
    "quaver::column_major_after",
    lambda codes, gradient: codes.new_empty(codes.shape[1], codes.shape[0]).t(),
    lib=_library,
)
