"""The casts of layouts.py: where each runs, and as operations of a compiler.

Eager code calls the functions below. Compiled code calls the operations of the same names, which return tensors only:
what is not wanted is empty. Results are contiguous, column codes in their transpose, whatever the strides of hp.

[Note: whose casts compiled code runs] A compiler that is given plain PyTorch generates kernels for casts, and merges
them with what computes the tensor; an operation reads what has been stored, in a kernel of its own. Which moves less
differs by recipe, by a few percent either way (docs/performance.md, "What compiled code moves for casts"), and which
is faster has not been measured. By default it is given plain PyTorch, but for kept scales, which only an operation can
read once; with QUAVER_KERNELS_IN_COMPILED_CODE=1 in the environment when quaver is imported, every cast of a linear is
an operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver import scaling
from quaver.phases import phase

Made = tuple[Any, ...]
"""Tensors; None where one is not wanted."""

_MAY_INTERPRET = bool(os.environ.get("TRITON_INTERPRET"))

COMPILED_CODE_CALLS_KERNELS = os.environ.get("QUAVER_KERNELS_IN_COMPILED_CODE", "") not in ("", "0")
"""See [Note: whose casts compiled code runs]."""


def runs_on_triton(float8_dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the Triton kernels take `tensors`. Without elements they cost nothing anywhere."""
    if not (tensors[0].is_cuda or _MAY_INTERPRET) or any(tensor.numel() == 0 for tensor in tensors):
        return False
    from quaver.kernels import triton_blocks  # imports triton, which a CPU does not need

    return all(triton_blocks.takes(tensor, float8_dtype) for tensor in tensors)


def under_dispatch_mode() -> bool:
    """Whether a compiler or a dispatch mode looks on: to it a cast is one operation, whatever its kernel needs besides.

    A selective checkpoint counts operations, and wants as many in its recomputation as in its forward.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def dense(tensor: Tensor) -> Tensor:
    """`tensor` as the kernels take it; a CPU's oracle takes any strides."""
    return tensor.contiguous() if tensor.is_cuda else tensor


@phase("quaver::cast")
def cast_layouts(
    hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool
) -> Made:
    """`layouts.cast_layouts`: row codes, column codes, quant_scale, dequant_scale, column sums."""
    hp = dense(hp)
    if runs_on_triton(float8_dtype, hp):
        from quaver.kernels import triton_layouts

        return triton_layouts.cast_layouts(hp, float8_dtype, rows, columns, power_of_2, sums)
    codes, quant, dequant = scaling.dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
    return (*_laid_out(codes, rows, columns), quant, dequant, _sums(hp, sums))


@phase("quaver::cast")
def cast_with_persistent_scale(
    hp: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
    sums: bool,
) -> Made:
    """`layouts.cast_with_persistent_scale`: as `cast_layouts`, then what was observed, float32 [2]."""
    hp = dense(hp)
    if runs_on_triton(float8_dtype, hp):
        from quaver.kernels import triton_layouts

        return triton_layouts.cast_with_persistent_scale(hp, quant_scale, float8_dtype, rows, columns, power_of_2, sums)
    codes, quant, dequant, observed = scaling.cast_with_persistent_scale(
        hp, quant_scale, float8_dtype, power_of_2=power_of_2
    )
    return (*_laid_out(codes, rows, columns), quant, dequant, _sums(hp, sums), observed)


@phase("quaver::cast")
def cast_axes(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool) -> Made:
    """`layouts.cast_axes`: codes, quant_scale and dequant_scale of the rows, then of the columns, and column sums."""
    hp = dense(hp)
    if runs_on_triton(float8_dtype, hp):
        from quaver.kernels import triton_layouts

        return triton_layouts.cast_axes(hp, float8_dtype, rows, columns, power_of_2, sums)
    of_rows: Made = (None, None, None)
    of_columns: Made = (None, None, None)
    if rows:
        codes, *scales = scaling.dynamic_cast(hp, float8_dtype, 1, power_of_2=power_of_2)
        of_rows = (_row_codes(codes), *scales)
    if columns:
        codes, *scales = scaling.dynamic_cast(hp, float8_dtype, 0, power_of_2=power_of_2)
        of_columns = (_column_codes(codes), *scales)
    return (*of_rows, *of_columns, _sums(hp, sums))


@phase("quaver::cast")
def cast_with_scales(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> Made:
    """`layouts.cast_with_scales`: row codes, column codes."""
    hp = dense(hp)
    if runs_on_triton(float8_dtype, hp):
        from quaver.kernels import triton_layouts

        return triton_layouts.cast_with_scales(hp, float8_dtype, row_scale, column_scale)
    row_codes = column_codes = None
    if row_scale is not None:
        row_codes = _row_codes(scaling.cast_to_float8(hp, row_scale, float8_dtype))
    if column_scale is not None:
        shared = row_codes if column_scale is row_scale else None
        codes = scaling.cast_to_float8(hp, column_scale, float8_dtype) if shared is None else shared
        column_codes = _column_codes(codes)
    return row_codes, column_codes


def _laid_out(codes: Tensor, rows: bool, columns: bool) -> Made:
    return _row_codes(codes) if rows else None, _column_codes(codes) if columns else None


def _row_codes(codes: Tensor) -> Tensor:
    return codes.contiguous()


def _column_codes(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0]).copy_(codes.t()).t()


def _sums(hp: Tensor, wanted: bool) -> Tensor | None:
    return hp.sum(0, dtype=torch.float32) if wanted else None


# ---- what compiled code runs: an operation returns tensors only, so what is not wanted is empty ------------------

_library = torch.library.Library("quaver", "FRAGMENT")
_OPERATIONS: dict[str, tuple[str, Callable[..., Made]]] = {
    "cast_layouts": (
        "(Tensor hp, ScalarType float8_dtype, bool rows, bool columns, bool power_of_2, bool sums)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        cast_layouts,
    ),
    "cast_layouts_with_persistent_scale": (
        "(Tensor hp, Tensor quant_scale, ScalarType float8_dtype, bool rows, bool columns, bool power_of_2, bool sums)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        cast_with_persistent_scale,
    ),
    "cast_axes": (
        "(Tensor hp, ScalarType float8_dtype, bool rows, bool columns, bool power_of_2, bool sums)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        cast_axes,
    ),
    "cast_with_scales": (
        "(Tensor hp, ScalarType float8_dtype, Tensor? row_scale, Tensor? column_scale) -> (Tensor, Tensor)",
        cast_with_scales,
    ),
}


def _operation(cast: Callable[..., Made]) -> Callable[..., tuple[Tensor, ...]]:
    def run(hp: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(hp.new_empty(0) if made is None else made for made in cast(hp, *args))

    return run


for _name, (_schema, _cast) in _OPERATIONS.items():
    _library.define(_name + _schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _operation(_cast), _device)


def _fake_codes(hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    height, width = hp.shape
    return (
        hp.new_empty(height, width, dtype=float8_dtype) if rows else hp.new_empty(0),
        hp.new_empty(width, height, dtype=float8_dtype).t() if columns else hp.new_empty(0),
    )


def _fake_scales(hp: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    return hp.new_empty(shape, dtype=torch.float32), hp.new_empty(shape, dtype=torch.float32)


def _fake_sums(hp: Tensor, wanted: bool) -> Tensor:
    return hp.new_empty(hp.shape[1], dtype=torch.float32) if wanted else hp.new_empty(0)


@torch.library.register_fake("quaver::cast_layouts")
def _fake_cast_layouts(
    hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool
) -> tuple[Tensor, ...]:
    return (*_fake_codes(hp, float8_dtype, rows, columns), *_fake_scales(hp), _fake_sums(hp, sums))


@torch.library.register_fake("quaver::cast_layouts_with_persistent_scale")
def _fake_cast_with_persistent_scale(
    hp: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    rows: bool,
    columns: bool,
    power_of_2: bool,
    sums: bool,
) -> tuple[Tensor, ...]:
    made = _fake_cast_layouts(hp, float8_dtype, rows, columns, power_of_2, sums)
    return (*made, hp.new_empty(2, dtype=torch.float32))


@torch.library.register_fake("quaver::cast_axes")
def _fake_cast_axes(
    hp: Tensor, float8_dtype: torch.dtype, rows: bool, columns: bool, power_of_2: bool, sums: bool
) -> tuple[Tensor, ...]:
    row_codes, column_codes = _fake_codes(hp, float8_dtype, rows, columns)
    of_rows = _fake_scales(hp, hp.shape[0], 1) if rows else (hp.new_empty(0), hp.new_empty(0))
    of_columns = _fake_scales(hp, 1, hp.shape[1]) if columns else (hp.new_empty(0), hp.new_empty(0))
    return row_codes, *of_rows, column_codes, *of_columns, _fake_sums(hp, sums)


@torch.library.register_fake("quaver::cast_with_scales")
def _fake_cast_with_scales(
    hp: Tensor, float8_dtype: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> tuple[Tensor, ...]:
    return _fake_codes(hp, float8_dtype, row_scale is not None, column_scale is not None)


# A copy of a graph's input can be made by its forward or by its backward. A compiler that may choose makes it in the
# forward and keeps it, which for a weight that FSDP2 gathered means to keep the weight. What reads a gradient, too, has
# to wait for it.
_library.define("column_codes_after(Tensor codes, Tensor gradient) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("column_codes_after", lambda codes, gradient: _column_codes(codes), _device)


@torch.library.register_fake("quaver::column_codes_after")
def _fake_column_codes_after(codes: Tensor, gradient: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0]).t()
