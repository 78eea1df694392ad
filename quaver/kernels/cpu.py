"""The casts of eager code on a CPU, one C call each; scaling.py is the oracle, to the bit. Matmuls are in cpu_mm.py.

Eager PyTorch spends about sixteen calls and ten passes over memory on a cast that needs two, so a C extension does it
(quaver/csrc/cpu.c). It is optional: an install without a compiler leaves it out, and QUAVER_PURE_PYTORCH=1 in the
environment turns it off. Each function has its twin in scaling.py or widen.py, for what `takes` refuses.

Every matrix is a plain, contiguous CPU tensor [rows, columns]: ask `takes` first. hp is float32, bfloat16 or float16;
float8 is e4m3fn or e5m2. `dim` is the one that an amax reduces: None for one scale (), 1 for one a row [rows, 1], 0 for
one a column [1, columns]; no other number. Scales are float32 and contiguous. No tracer and no dispatch mode sees what
happens here, and results have no history.

Large matrices are shared out between torch.get_num_threads() threads, in the OpenMP pool of PyTorch where this was
built with OpenMP (on Linux).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor, empty_like
from torch._subclasses.fake_tensor import FakeTensor

from quaver.scaling import PLAIN_TYPES


def _load() -> tuple[Any, str | None]:
    if os.environ.get("QUAVER_PURE_PYTORCH", "") not in ("", "0"):
        return None, "QUAVER_PURE_PYTORCH is set"
    try:
        return importlib.import_module("quaver._cpu"), None
    except ImportError as error:
        return None, f"quaver._cpu was not built at install, or does not load: {error}"


extension, UNAVAILABLE_BECAUSE = _load()
"""Why this process casts in PyTorch only; None where it has the extension."""

AVAILABLE = UNAVAILABLE_BECAUSE is None

# The numbers of cpu.c.
HP_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT8_KIND = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_TENSORWISE = -1

_CONVERSIONS = {(hp, float8) for hp in HP_KIND for float8 in FLOAT8_KIND} | {
    (float8, wide) for float8 in FLOAT8_KIND for wide in (torch.bfloat16, torch.float32)
}

_THREADS_PAY_FROM = 1 << 17  # elements; about 20 us of work for one thread
# What is made from a tensor costs less than torch.empty(()), and ignores the default dtype and device.
_SCALAR = torch.empty((), dtype=torch.float32, device="cpu")


def takes(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether these functions take `matrix`, hp or float8, to `dtype`. Do not ask while compiling."""
    return type(matrix) in PLAIN_TYPES and _converts(matrix, dtype) and matrix.is_contiguous()


def takes_codes(codes: Tensor, dtype: torch.dtype) -> bool:
    """Whether `widen` takes these codes to `dtype`: as `takes`, but each row need only be contiguous in itself."""
    if type(codes) not in PLAIN_TYPES or not _converts(codes, dtype):
        return False
    return codes.is_contiguous() or (codes.stride(1) == 1 and codes.stride(0) >= codes.shape[1])


def would_take(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether `takes` would hold if `matrix` were real: a fake tensor of a mode that stands for real ones.

    Other fake modes, such as a compiler's, want to see the operations of which a cast consists.
    """
    return (
        type(matrix) is FakeTensor
        and getattr(matrix.fake_mode, "stands_for_real", False)
        and _converts(matrix, dtype)
        and matrix.is_contiguous()
    )


def _converts(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether the extension has this conversion of a matrix, whatever its layout."""
    return AVAILABLE and matrix.is_cpu and (matrix.dtype, dtype) in _CONVERSIONS and matrix.dim() == 2


def _threads(elements: int) -> int:
    return 1 if elements < _THREADS_PAY_FROM else torch.get_num_threads()


def _empty_scale(rows: int, columns: int, dim: int) -> Tensor:
    if dim == 1:
        return _SCALAR.new_empty(rows, 1)
    if dim == 0:
        return _SCALAR.new_empty(1, columns)
    raise ValueError(f"expected dim None, 0 or 1, got {dim}")


def _dim_of_scale(scale: Tensor, rows: int, columns: int) -> int:
    """The C code's `dim` for a scale of shape (), [rows, 1] or [1, columns]."""
    if scale.dtype is torch.float32 and scale.is_contiguous():
        if scale.numel() == 1:
            return _TENSORWISE
        if scale.shape == (rows, 1):
            return 1
        if scale.shape == (1, columns):
            return 0
    raise ValueError(
        f"expected a contiguous float32 scale of shape (), {[rows, 1]} or {[1, columns]}, "
        f"got {scale.dtype} of {list(scale.shape)} with strides {scale.stride()}"
    )


def dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None = None, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `hp` with the scales of its own amaxes.

    Args:
        hp: [rows, columns].
        float8_dtype: what to cast to.
        dim: None, 1 or 0; see the top of the file.
        power_of_2: round the scales down to powers of two.
    Returns:
        float8 [rows, columns], quant_scale, dequant_scale.
    Raises:
        ValueError: another dim.
    """
    rows, columns = hp.shape
    codes = empty_like(hp, dtype=float8_dtype)
    quant_scale = empty_like(_SCALAR) if dim is None else _empty_scale(rows, columns, dim)
    dequant_scale = empty_like(quant_scale)
    extension.dynamic_cast(
        hp.data_ptr(),
        codes.data_ptr(),
        quant_scale.data_ptr(),
        dequant_scale.data_ptr(),
        rows,
        columns,
        columns,
        HP_KIND[hp.dtype],
        FLOAT8_KIND[float8_dtype],
        _TENSORWISE if dim is None else dim,
        power_of_2,
        _threads(rows * columns),
    )
    return codes, quant_scale, dequant_scale


def dynamic_cast_axes(
    hp: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dynamic_cast` with dim 1 and with dim 0, from two reads of `hp` [rows, columns] instead of three.

    Returns:
        float8 [rows, columns], quant_scale and dequant_scale [rows, 1]; the same with scales [1, columns].
    """
    rows, columns = hp.shape
    row_codes, column_codes = empty_like(hp, dtype=float8_dtype), empty_like(hp, dtype=float8_dtype)
    row_quant, column_quant = _SCALAR.new_empty(rows, 1), _SCALAR.new_empty(1, columns)
    row_dequant, column_dequant = empty_like(row_quant), empty_like(column_quant)
    extension.cast_axes(
        hp.data_ptr(),
        row_codes.data_ptr(),
        row_quant.data_ptr(),
        row_dequant.data_ptr(),
        column_codes.data_ptr(),
        column_quant.data_ptr(),
        column_dequant.data_ptr(),
        rows,
        columns,
        HP_KIND[hp.dtype],
        FLOAT8_KIND[float8_dtype],
        power_of_2,
        _threads(rows * columns),
    )
    return row_codes, row_quant, row_dequant, column_codes, column_quant, column_dequant


def cast_with_scale(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Cast `hp` [rows, columns] with a scale of shape (), [rows, 1] or [1, columns], saturating; NaN stays NaN.

    Raises ValueError for a scale of another shape, dtype or layout.
    """
    rows, columns = hp.shape
    codes = empty_like(hp, dtype=float8_dtype)
    extension.cast_with_scale(
        hp.data_ptr(),
        codes.data_ptr(),
        quant_scale.data_ptr(),
        0,
        rows,
        columns,
        columns,
        HP_KIND[hp.dtype],
        FLOAT8_KIND[float8_dtype],
        _dim_of_scale(quant_scale, rows, columns),
        0,
        _threads(rows * columns),
    )
    return codes


def cast_and_observe(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, power_of_2: bool, observed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`quaver.scaling.cast_with_persistent_scale` of `hp` [rows, columns], in one pass where the scale is known.

    Args:
        quant_scale: float32 (); what is not above 0 stands for the scale of hp's own amax.
        observed: float32 [2], contiguous; updated in place by the maximum with hp's amax and saturated elements.
    Returns:
        float8 [rows, columns], and the quant_scale and dequant_scale () that were used.
    """
    rows, columns = hp.shape
    codes = empty_like(hp, dtype=float8_dtype)
    quant, dequant = empty_like(_SCALAR), empty_like(_SCALAR)
    extension.cast_and_observe(
        hp.data_ptr(),
        codes.data_ptr(),
        quant_scale.data_ptr(),
        quant.data_ptr(),
        dequant.data_ptr(),
        observed.data_ptr(),
        rows,
        columns,
        HP_KIND[hp.dtype],
        FLOAT8_KIND[float8_dtype],
        power_of_2,
        _threads(rows * columns),
    )
    return codes, quant, dequant


def use_avx512(whether: bool) -> bool:
    """Have the casts use AVX-512 where this CPU has what they take of it, or not; the bits are the same.

    Returns whether they did before; at first they do wherever they can. For tests.
    """
    return bool(extension.use_avx512(whether))


def elements_read() -> int:
    """How many elements of high-precision matrices the casts have read so far, for tests and profiles."""
    return int(extension.elements_read())


def widen(codes: Tensor, dtype: torch.dtype, scale: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """float8 [rows, columns] -> bfloat16 or float32, exactly, NaN and inf included; times a scale where given.

    The scale is (), [rows, 1] or [1, columns]. For bfloat16 its numbers must be powers of two, 2^-110 or more (or
    0, inf, NaN): then products are exact. For float32 any will do, and products are rounded once.

    Args:
        codes: what `takes_codes` takes.
        room: contiguous memory of `dtype` for the result, [rows * columns] or more; None to allocate it.
    Raises:
        ValueError: another dtype, a scale of another shape, dtype or layout, or a room of another dtype or too small.
    """
    if dtype is not torch.bfloat16 and dtype is not torch.float32:
        raise ValueError(f"expected bfloat16 or float32, got {dtype}")
    rows, columns = codes.shape
    if room is None:
        out = codes.new_empty(rows, columns, dtype=dtype)
    elif room.dtype is not dtype or room.numel() < rows * columns or not room.is_contiguous():
        raise ValueError(f"expected room for {rows * columns} of {dtype}, got {room.dtype} of {list(room.shape)}")
    else:
        out = room.view(-1)[: rows * columns].view(rows, columns)
    extension.widen(
        out.data_ptr(),
        codes.data_ptr(),
        0,
        0 if scale is None else scale.data_ptr(),
        rows,
        columns,
        codes.stride(0) if columns and rows > 1 else columns,
        HP_KIND[dtype],
        FLOAT8_KIND[codes.dtype],
        _TENSORWISE if scale is None else _dim_of_scale(scale, rows, columns),
        0,
        _threads(rows * columns),
    )
    return out
