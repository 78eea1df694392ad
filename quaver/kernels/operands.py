"""`Operand` and `Operands`, the results of a cast, and their flat form: the tensors that an operation returns.

`BlockCast` holds the arguments of a cast in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quaver.recipes.scale_layout import ALL, TENSORWISE, ScaleLayout, make_block_layout


class Operand(NamedTuple):
    """One operand of one matmul: float8 codes with their scales, or a high-precision matrix without scales."""

    data: Tensor
    dequant_scale: Tensor | None = None
    """float32 of the shape that `layout` gives; e4m3 if there is an outer_scale."""
    layout: ScaleLayout = TENSORWISE
    """Which elements of `data` share a scale; within a group, if rows belong to groups (experts/groups.py)."""
    quant_scale: Tensor | None = None
    """The scale that the codes were cast with; None if it is not known, and in parts, transposes and moved copies."""
    outer_scale: Tensor | None = None
    """float32 (), which multiplies every dequant_scale (e2m1); None for float8."""

    @property
    def size(self) -> tuple[int, int]:
        """The rows and columns of the matrix."""
        return self.layout.get_matrix_size(self.data)

    def varies_along(self, dim: int) -> bool:
        """Return `ScaleLayout.varies_along`; always True with an outer_scale."""
        return self.outer_scale is not None or self.layout.varies_along(dim, self.size)

    def t(self) -> Operand:
        """Return the transposed operand, with transposed scales and without its quant_scale."""
        dequant = self.dequant_scale
        dequant = dequant if dequant is None or dequant.dim() == 0 else dequant.t()
        return Operand(self.data.t(), dequant, self.layout.t(), None, self.outer_scale)

    def to(self, device: torch.device) -> Operand:
        """Return the operand on `device`."""
        scale = self.dequant_scale
        outer = None if self.outer_scale is None else self.outer_scale.to(device)
        return Operand(self.data.to(device), None if scale is None else scale.to(device), self.layout, None, outer)

    def narrow(self, dim: int, start: int, length: int) -> Operand:
        """Return a view of `length` rows (dim 0) or columns (dim 1). `start` is the beginning of a block."""
        scale, block = self.dequant_scale, self.layout[dim]
        if scale is not None and block != ALL:
            scale = scale.narrow(dim, start // block, -(-length // block))
        return Operand(self.data.narrow(dim, start, length), scale, self.layout, None, self.outer_scale)

    def select_rows(self, indices: Tensor) -> Operand:
        """Copy some rows, each with its own scales unless all rows share one."""
        scale, layout = self.dequant_scale, self.layout
        if scale is not None and layout.rows != ALL:
            scale, layout = scale[indices // layout.rows], layout._replace(rows=1)
        return Operand(self.data[indices], scale, layout, None, self.outer_scale)


class Operands(NamedTuple):
    """The operands of a matrix's two matmuls; None for an operand that was not requested.

    Both may be one object, or the same codes in two layouts with one set of scales.
    """

    row: Operand | None
    column: Operand | None


Value = TypeVar("Value")


def require(value: Value | None, name: str) -> Value:
    """Return `value`. Raises RuntimeError, with the `name` of what is missing, for None."""
    if value is None:
        raise RuntimeError(
            f"{name} is missing: its cast was not asked for it, or the matrix is in high precision, which has no scales"
        )
    return value


def select_directions(operand: Operand, row: bool, column: bool) -> Operands:
    """Return `operand` for each requested direction: one set of codes serves both."""
    return Operands(operand if row else None, operand if column else None)


def pair_codes(
    row_codes: Tensor | None,
    column_codes: Tensor | None,
    quant: Tensor,
    dequant: Tensor,
    layout: ScaleLayout = TENSORWISE,
) -> Operands:
    """Pair codes in two layouts with one set of scales; None for a layout that was not requested."""
    row = None if row_codes is None else Operand(row_codes, dequant, layout, quant)
    return Operands(row, None if column_codes is None else Operand(column_codes, dequant, layout, quant))


def cast_by_layout(cast: Callable[[ScaleLayout], Operand], row: bool, column: bool, layout: ScaleLayout) -> Operands:
    """Call `cast` with the layout of each requested direction. `layout` is the layout of row codes.

    If both directions have the same layout, as square blocks have, one call serves both.
    """
    if layout.rows == layout.columns:
        return select_directions(cast(layout), row, column)
    return Operands(cast(layout) if row else None, cast(layout.get_column_layout()) if column else None)


class BlockCast(NamedTuple):
    """The arguments of `cast_blockwise` after the matrix [R, C], whose blocks are `dot_products` x `length`.

    Row blocks have `length` columns and scales [ceil(R / dot_products), ceil(C / length)]. Column blocks have `length`
    rows and scales [ceil(R / length), ceil(C / dot_products)]. Square blocks are cast once.
    """

    float8_dtype: torch.dtype
    row: bool
    column: bool
    power_of_2: bool
    dot_products: int
    length: int
    rule: str
    """As for `scaling.compute_scales`."""

    @property
    def row_layout(self) -> ScaleLayout:
        """The layout of row codes."""
        return make_block_layout(self.float8_dtype, self.dot_products, self.length)


def has_column_major_scales(layout: ScaleLayout, row: bool) -> bool:
    """Return whether a GPU cast of blocks writes the dequant_scale column-major, as the hardware's matmul reads it.

    True for row codes in blocks of 1 x n, and for square blocks without row codes.
    """
    return layout.rows == 1 or (layout.rows == layout.columns and not row)


def empty_block_scales(hp: Tensor, layout: ScaleLayout, *, is_column_major: bool) -> list[Tensor]:
    """Allocate the float32 quant_scale and dequant_scale of the blocks of `hp` [R, C]."""
    down, across = layout.get_scale_shape(hp.shape[0], hp.shape[1])
    quant = hp.new_empty(down, across, dtype=torch.float32)
    if is_column_major:
        return [quant, hp.new_empty(across, down, dtype=torch.float32).t()]
    return [quant, torch.empty_like(quant)]


class FlatOperands(NamedTuple):
    """The tensors of `Operands`, as an operation returns them.

    None for tensors that were not requested. An operation must return a tensor only once, so it is also None for
    tensors that the column operand shares with the row operand.
    """

    row_codes: Tensor | None = None
    row_quant: Tensor | None = None
    row_dequant: Tensor | None = None
    column_codes: Tensor | None = None
    column_quant: Tensor | None = None
    column_dequant: Tensor | None = None
    row_outer: Tensor | None = None
    column_outer: Tensor | None = None


def flatten_operands(operands: Operands) -> FlatOperands:
    """List the tensors of both operands."""
    row, column = operands
    flat = FlatOperands()
    if row is not None:
        flat = FlatOperands(row.data, row.quant_scale, row.dequant_scale, row_outer=row.outer_scale)
    if column is not None and column is not row:
        flat = flat._replace(column_codes=column.data)
        if row is None or column.quant_scale is not row.quant_scale:
            scales = column.quant_scale, column.dequant_scale, column.outer_scale
            flat = flat._replace(column_quant=scales[0], column_dequant=scales[1], column_outer=scales[2])
    return flat


def unflatten_operands(flat: FlatOperands, row: bool, column: bool, layout: ScaleLayout) -> Operands:
    """Invert `flatten_operands`, also for an operation's result, with tensors of shape (0,) instead of None.

    `layout`: the layout of row codes.
    """
    codes, quant, dequant, column_codes, column_quant, column_dequant, row_outer, column_outer = flat
    row_outer, column_outer = (row_outer, column_outer) if layout.is_packed else (None, None)
    row_operand = Operand(require(codes, "the tensor of row codes"), dequant, layout, quant, row_outer) if row else None
    if not column:
        return Operands(row_operand, None)
    if row_operand is None or not _is_missing(column_quant):
        column_layout = layout.get_column_layout()
        column_operand = Operand(
            require(column_codes, "the tensor of column codes"),
            column_dequant,
            column_layout,
            column_quant,
            column_outer,
        )
        return Operands(row_operand, column_operand)
    is_one = _is_missing(column_codes)
    return Operands(
        row_operand,
        row_operand if is_one else row_operand._replace(data=require(column_codes, "the tensor of column codes")),
    )


def _is_missing(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.shape == (0,)
