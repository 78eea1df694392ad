"""The result of a cast: a matrix as the operands of its two matmuls; and as the tensors that an operation returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quaver.recipes.scale_layout import ALL, TENSORWISE, ScaleLayout


class Operand(NamedTuple):
    """One operand of one matmul: float8 codes with their scales, or a matrix in high precision without."""

    data: Tensor
    dequant_scale: Tensor | None = None
    """float32, of the shape that `layout` gives it; e4m3 where there is an outer_scale."""
    layout: ScaleLayout = TENSORWISE
    """Which elements of `data` share a scale; of rows that belong to groups (experts/groups.py), which of a group."""
    quant_scale: Tensor | None = None
    """The scale that the codes were made with, where it is known."""
    outer_scale: Tensor | None = None
    """float32 (), which multiplies every dequant_scale; None in formats of one level."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.layout.size_of(self.data)

    def varies_along(self, dim: int) -> bool:
        """`ScaleLayout.varies_along`, which is so of two levels of scales, too."""
        return self.outer_scale is not None or self.layout.varies_along(dim, self.size)

    def t(self) -> Operand:
        """The transposed operand; scales of rows, columns or blocks are transposed with it."""
        dequant = self.dequant_scale
        dequant = dequant if dequant is None or dequant.dim() == 0 else dequant.t()
        return Operand(self.data.t(), dequant, self.layout.t(), None, self.outer_scale)

    def to(self, device: torch.device) -> Operand:
        """The operand on `device`."""
        scale = self.dequant_scale
        outer = None if self.outer_scale is None else self.outer_scale.to(device)
        return Operand(self.data.to(device), None if scale is None else scale.to(device), self.layout, None, outer)

    def part(self, dim: int, start: int, length: int) -> Operand:
        """Rows (dim 0) or columns (dim 1) of a matrix from the beginning of a block; it shares the memory."""
        scale, block = self.dequant_scale, self.layout[dim]
        if scale is not None and block != ALL:
            scale = scale.narrow(dim, start // block, -(-length // block))
        return Operand(self.data.narrow(dim, start, length), scale, self.layout, None, self.outer_scale)

    def rows(self, indices: Tensor) -> Operand:
        """Some rows of a matrix, copied; each has scales of its own, unless all rows share them."""
        scale, layout = self.dequant_scale, self.layout
        if scale is not None and layout.rows != ALL:
            scale, layout = scale[indices // layout.rows], layout._replace(rows=1)
        return Operand(self.data[indices], scale, layout, None, self.outer_scale)


class Operands(NamedTuple):
    """A matrix [rows, columns] as its two matmuls read it; None for an operand that was not asked for.

    Both may be one object, or two layouts of codes with the same scales.
    """

    row: Operand | None
    column: Operand | None


Present = TypeVar("Present")


def present(value: Present | None) -> Present:
    """An operand, or a scale. Raises RuntimeError if the matrix was not quantized for it."""
    if value is None:
        raise RuntimeError("a matrix was quantized for one of its two matmuls, and both read it")
    return value


def asked_for(operand: Operand, row: bool, column: bool) -> Operands:
    """`operand` for each direction that is asked for: one set of codes serves both."""
    return Operands(operand if row else None, operand if column else None)


def of_one_scale(
    row_codes: Tensor | None,
    column_codes: Tensor | None,
    quant: Tensor,
    dequant: Tensor,
    layout: ScaleLayout = TENSORWISE,
) -> Operands:
    """Two copies of codes with the same scales; None for one that was not asked for."""
    row = None if row_codes is None else Operand(row_codes, dequant, layout, quant)
    return Operands(row, None if column_codes is None else Operand(column_codes, dequant, layout, quant))


def cast_by_layout(cast: Callable[[ScaleLayout], Operand], row: bool, column: bool, layout: ScaleLayout) -> Operands:
    """The operands of `cast` for each direction that is asked for, of row codes of `layout`.

    Where the transposed layout is the same, as that of square blocks, one cast serves both.
    """
    if layout.rows == layout.columns:
        return asked_for(cast(layout), row, column)
    return Operands(cast(layout) if row else None, cast(layout.turned()) if column else None)


def has_scales_by_columns(layout: ScaleLayout, row: bool) -> bool:
    """Whether a GPU's dequant_scale of blocks is column-major, as the hardware's matmul reads it.

    Those of row codes in blocks of 1 x n are, and those of square blocks where no row codes are made.
    """
    return layout.rows == 1 or (layout.rows == layout.columns and not row)


def empty_block_scales(hp: Tensor, layout: ScaleLayout, by_columns: bool) -> list[Tensor]:
    """Memory for the quant_scale and the dequant_scale of the blocks of `hp` [R, C], float32."""
    down, across = layout.scale_shape(hp.shape[0], hp.shape[1])
    quant = hp.new_empty(down, across, dtype=torch.float32)
    if by_columns:
        return [quant, hp.new_empty(across, down, dtype=torch.float32).t()]
    return [quant, torch.empty_like(quant)]


OF_CODES_AND_SCALES = 6
"""The tensors of `flattened` that formats of one level have."""

FLAT = OF_CODES_AND_SCALES + 2
"""The tensors of `flattened`: three of rows, three of columns, and the outer_scale of each."""


def flattened(operands: Operands) -> list[Tensor | None]:
    """Codes, quant_scale and dequant_scale of rows and of columns, and outer_scales, each tensor once, as an operation
    must return them.

    None for what was not asked for, and for what of the column is the row's.
    """
    row, column = operands
    flat: list[Tensor | None] = [None] * FLAT
    if row is not None:
        flat[:3] = row.data, row.quant_scale, row.dequant_scale
        flat[OF_CODES_AND_SCALES] = row.outer_scale
    if column is not None and column is not row:
        flat[3] = column.data
        if row is None or column.quant_scale is not row.quant_scale:
            flat[4:6] = column.quant_scale, column.dequant_scale
            flat[-1] = column.outer_scale
    return flat


def unflattened(flat: Sequence[Any], row: bool, column: bool, layout: ScaleLayout) -> Operands:
    """The operands of which an operation returned the tensors; those that are absent are of shape (0,).

    `layout`: that of row codes.
    """
    outers = [each if layout.is_packed else None for each in flat[OF_CODES_AND_SCALES:]] or [None, None]
    of_row = Operand(flat[0], flat[2], layout, flat[1], outers[0]) if row else None
    if not column:
        return Operands(of_row, None)
    if of_row is None or flat[4].shape != (0,):
        return Operands(of_row, Operand(flat[3], flat[5], layout.turned(), flat[4], outers[1]))
    return Operands(of_row, of_row if flat[3].shape == (0,) else of_row._replace(data=flat[3]))
