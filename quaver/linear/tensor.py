"""`Float8Tensor`: quantized operands with the shape and dtype of the high-precision tensor that they came from.

It crosses module boundaries. FSDP2 sets an all-gathered weight as its module's parameter, and tensor parallelism passes
an all-gathered activation to a module's forward; both are quantized before the all-gather. The tensor presents the
shape, dtype and gradients of the high-precision tensor, and holds codes and scales, which `Float8Linear` reads. Frozen
weights (frozen_weight.py) and primary weights (weights/primary_weight.py) are subclasses. An ordinary linear on one
device has no such tensor.

A matrix is an operand of two matmuls, along its rows and along its columns (quantize.py). If one cast serves both
(tensorwise), the two operands are the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from quaver.kernels.cpu import check_memory
from quaver.kernels.operands import Operand, Operands, require
from quaver.linear.weight_form import TensorForm, make_wrapper
from quaver.recipes.formats import E2M1, E4M3, FLOAT8_FORMATS
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scaling import dequantize
from quaver.torch_private.dispatch import OpOverload

aten = torch.ops.aten

_ROW_TENSORS = ["data_fp8", "dequant_scale", "outer_scale"]
"""The tensors of the row operand. A separate column operand has the same names after "column_"."""

Metadata = tuple[torch.dtype, str, tuple[ScaleLayout, ScaleLayout]]
"""The dtype of a flattened `Float8Tensor`; its column operand, "none", "shared" or "separate"; and the layouts."""


class Float8Tensor(TensorForm):
    """Quantized operands with the shape and dtype of the tensor that they came from."""

    data_fp8: Tensor
    """The codes of the row operand, float8 [..., K]."""
    dequant_scale: Tensor
    """The scale of the row operand, float32 (), [..., 1] or, for blocks of one row, [..., n]."""
    column_data_fp8: Tensor | None
    """The codes of the column operand, float8 [..., K]. `data_fp8` itself if one cast serves both directions; None if
    the tensor was not quantized for the column direction."""
    column_dequant_scale: Tensor | None
    """The scale of the column operand, float32 (), [1, K] or [n, K]; the row operand's or None where the codes are."""
    layouts: tuple[ScaleLayout, ScaleLayout]
    """For each operand, which elements of the matrix [rows, K] share a scale."""
    outer_scale: Tensor | None
    """The outer scale of the row operand, float32 (); None in formats of one level."""
    column_outer_scale: Tensor | None
    """The outer scale of the column operand, float32 (); None in formats of one level."""

    @staticmethod
    def __new__(cls, row: Operand, column: Operand | None, dtype: torch.dtype) -> Self:
        """Make one of operands that a cast or another Float8Tensor made; `from_operands` checks them."""
        return make_wrapper(cls, row.data, dtype, row.size if row.layout.is_packed else None)

    def __init__(self, row: Operand, column: Operand | None, dtype: torch.dtype) -> None:
        self.set_operands(row, column)

    @classmethod
    def from_operands(cls, row: Operand, column: Operand | None, dtype: torch.dtype) -> Self:
        """Make the quantized form of a tensor of `dtype`.

        Raises:
            ValueError: an operand is not float8, or its scale is missing, on another device or not as `layout` says;
                or the operands have different shapes. The scales of a stack of matrices may have any shape.
        """
        for operand in (row, column):
            if operand is not None:
                _check_operand(operand)
        if column is not None and column.data.shape != row.data.shape:
            raise ValueError(f"expected two casts of one tensor, got {list(row.data.shape)}, {list(column.data.shape)}")
        return cls(row, column, dtype)

    def set_operands(self, row: Operand, column: Operand | None) -> None:
        """Replace codes and scales, keeping the shape."""
        self.data_fp8, self.dequant_scale = row.data, _get_scale(row)
        self.layouts = row.layout, (row if column is None else column).layout
        self.outer_scale, self.column_outer_scale = row.outer_scale, None if column is None else column.outer_scale
        if column is None:
            self.column_data_fp8 = self.column_dequant_scale = None
        else:
            self.column_data_fp8, self.column_dequant_scale = column.data, _get_scale(column)

    def get_stored_operands(self) -> Operands:
        """Return both operands in the shape of the tensor; the column operand is None if it was not quantized."""
        check_memory(self.data_fp8, self.dequant_scale, self.column_data_fp8)  # FSDP2 frees all-gathered memory
        return self.get_unchecked_operands()

    def get_unchecked_operands(self) -> Operands:
        """Return `get_stored_operands` without the check that the memory was not freed."""
        row = Operand(self.data_fp8, self.dequant_scale, self.layouts[0], None, self.outer_scale)
        if self.column_data_fp8 is None:
            return Operands(row, None)
        if self.column_data_fp8 is self.data_fp8:
            return Operands(row, row)
        scale, outer_scale = self.column_dequant_scale, self.column_outer_scale
        return Operands(row, Operand(self.column_data_fp8, scale, self.layouts[1], None, outer_scale))

    def get_operands(self) -> Operands:
        """Return both operands of the matrix [rows, K]; the column operand is None if it was not quantized."""
        row, column = self.get_stored_operands()
        row = require(row, "the row operand")
        scale = require(row.dequant_scale, "the dequant_scale")
        if scale.dim() > 0:
            scale = scale.reshape(-1, scale.shape[-1])
        if column is not None:
            column = column._replace(data=_flatten_rows(column.data))
        return Operands(row._replace(data=_flatten_rows(row.data), dequant_scale=scale), column)

    def check_casts(self, casts: OperandCasts, *, transposed: bool = False) -> None:
        """Raise RuntimeError if this tensor was not quantized with `casts`; see `explain_cast_mismatch`."""
        if mismatch := self.explain_cast_mismatch(casts, transposed=transposed):
            raise RuntimeError(mismatch)

    def explain_cast_mismatch(self, casts: OperandCasts, *, transposed: bool = False) -> str:
        """Return how this differs from a tensor quantized with `casts` and what to do, or "" if it does not.

        Compares the dtypes and layouts of the operands that both have in float8.

        Args:
            transposed: whether this is a weight of experts that is stored [E, K, N], so that `casts.row` made the
                codes of stored columns.
        """
        row, column = (casts.column_source, casts.row) if transposed else (casts.row, casts.column_source)
        row_layout, column_layout = row.layout, column.layout and column.layout.get_column_layout()
        if casts.is_dequantized:
            row_layout = column_layout = column_layout if transposed else row_layout
        operands = ((row, row_layout, self.data_fp8), (column, column_layout, self.column_data_fp8))
        for (cast, expected, codes), layout in zip(operands, self.layouts, strict=True):
            if cast.is_disabled or codes is None:
                continue
            if codes.dtype is not cast.float8_dtype or expected not in (None, layout):
                return (
                    f"a Float8Tensor {list(self.shape)} is stored as {layout} {codes.dtype}, and the linear that reads "
                    f"it casts it as {cast}; quantize it under the config of that linear"
                )
        return ""

    def to_high_precision(self) -> Tensor:
        """Dequantize the row codes to the tensor's dtype. Not differentiable."""
        with torch.no_grad():
            data, scale, layout, _, outer = require(self.get_operands().row, "the row operand")
            return dequantize(data, require(scale, "the scale"), self.dtype, layout, outer).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        column_kind = "separate"
        if self.column_data_fp8 is None or self.column_data_fp8 is self.data_fp8:
            column_kind = "none" if self.column_data_fp8 is None else "shared"
        names = (
            [*_ROW_TENSORS, *(f"column_{name}" for name in _ROW_TENSORS)] if column_kind == "separate" else _ROW_TENSORS
        )
        return [name for name in names if getattr(self, name) is not None], (self.dtype, column_kind, self.layouts)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: Metadata, outer_size: object, outer_stride: object
    ) -> Float8Tensor:
        dtype, column_kind, layouts = meta
        row = Operand(inner["data_fp8"], inner["dequant_scale"], layouts[0], None, inner.get("outer_scale"))
        column = row if column_kind == "shared" else None
        if column_kind == "separate":
            codes, scale, outer = (inner.get(f"column_{name}") for name in _ROW_TENSORS)
            column = Operand(require(codes, "the tensor of column codes"), scale, layouts[1], None, outer)
        return cls(row, column, dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Float8Tensor(shape={list(self.shape)}, {self.data_fp8.dtype} for {self.dtype}, device={self.device})"

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = _OP_HANDLERS.get(func)
        return self.get_values(func, is_written=False) if handler is None else handler(func, *args, **kwargs)

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        raise NotImplementedError(
            f"{func} is not defined on a Float8Tensor: its codes mean nothing without their scales. "
            "Give it to a Float8Linear, or call to_high_precision() first"
        )


def _check_operand(operand: Operand) -> None:
    codes, scale, layout, _, outer_scale = operand
    if scale is None or not (codes.dtype in FLOAT8_FORMATS or codes.dtype is E2M1.dtype):
        lack = " without a scale" if scale is None else ""
        raise ValueError(f"expected float8 data with a scale, got {codes.dtype}{lack}")
    dtype = torch.float32 if outer_scale is None else E4M3.dtype
    shape = layout.get_scale_shape(*operand.size) if codes.dim() == 2 else scale.shape
    if scale.dtype is not dtype or scale.device != codes.device or scale.shape != shape:
        raise ValueError(
            f"dequant_scale: expected {dtype} of shape {list(shape)} on {codes.device} for {layout} codes of "
            f"{list(codes.shape)}, got {scale.dtype} of shape {list(scale.shape)} on {scale.device}"
        )


def _get_scale(operand: Operand) -> Tensor:
    if operand.dequant_scale is None:
        raise ValueError("expected float8 data with a scale, got data in high precision")
    return operand.dequant_scale


def _flatten_rows(data: Tensor) -> Tensor:
    return data if data.dim() == 2 else data.reshape(-1, data.shape[-1])


def _map(
    tensor: Float8Tensor, map_data: Callable[[Tensor], Tensor], map_scale: Callable[[Tensor], Tensor]
) -> Float8Tensor:
    """Rebuild with `map_data` applied to codes and `map_scale` to the row operand's scale. Shared codes stay shared.

    The operations here move no column, so the column operand keeps its scales.
    """
    stored, column = tensor.get_unchecked_operands()
    row = require(stored, "the stored operand")._replace(
        data=map_data(tensor.data_fp8), dequant_scale=map_scale(tensor.dequant_scale)
    )
    if column is not None:
        column = row if column is stored else column._replace(data=map_data(column.data))
    return Float8Tensor(row, column, tensor.dtype)


def _alias(func: Any, tensor: Float8Tensor) -> Tensor:
    return _map(tensor, func, func)


def _clone(func: Any, tensor: Float8Tensor, **kwargs: Any) -> Tensor:
    return _map(tensor, lambda data: func(data, **kwargs), lambda scale: scale)


def _view(func: Any, tensor: Float8Tensor, size: list[int]) -> Tensor:
    """Merge or split leading dims. The last dim stays, because scales run along it."""
    if not size or size[-1] not in (-1, tensor.shape[-1]):
        raise NotImplementedError(
            f"expected a view of a Float8Tensor {list(tensor.shape)} with the same last dim, got {size}"
        )

    size = [*size[:-1], tensor.shape[-1]]
    moves = size != list(tensor.shape)
    if moves and tensor.dequant_scale.dim() and tensor.dequant_scale.shape[:-1] != tensor.shape[:-1]:
        raise NotImplementedError(
            f"expected a view of a Float8Tensor in blocks with its shape {list(tensor.shape)}, got {size}"
        )

    def map_scale(scale: Tensor) -> Tensor:
        return scale.reshape([*size[:-1], scale.shape[-1]]) if moves and scale.dim() else scale

    return _map(tensor, lambda data: func(data, [*size[:-1], data.shape[-1]]), map_scale)


def _as_strided(func: Any, tensor: Float8Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or storage_offset:
        raise NotImplementedError(
            f"expected as_strided of a Float8Tensor with its shape {list(tensor.shape)}, got {list(size)}"
        )
    return _alias(aten.alias.default, tensor)


_OP_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.as_strided.default: _as_strided,
}
