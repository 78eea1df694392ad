"""The result of a cast: a matrix as the operands of its two matmuls; and as the tensors that an operation returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quaver.recipes.scaling import block_counts


class Operand(NamedTuple):
    """One operand of one matmul: float8 codes with their scales, or a matrix in high precision without."""

    data: Tensor
    dequant_scale: Tensor | None
    """float32: (), the matrix's with the contracted dim 1, or blocks'."""
    quant_scale: Tensor | None = None
    """The scale that the codes were made with, where it is known."""

    def t(self) -> Operand:
        """The transposed operand; scales of rows, columns or blocks are transposed with it."""
        dequant = self.dequant_scale
        return Operand(self.data.t(), dequant if dequant is None or dequant.dim() == 0 else dequant.t())


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


def of_one_scale(row_codes: Tensor | None, column_codes: Tensor | None, quant: Tensor, dequant: Tensor) -> Operands:
    """Two layouts of codes with one scale; None for a layout that was not asked for."""
    row = None if row_codes is None else Operand(row_codes, dequant, quant)
    return Operands(row, None if column_codes is None else Operand(column_codes, dequant, quant))


def of_blocks(
    cast: Callable[[tuple[int, int]], Operand], row: bool, column: bool, dot_products: int, length: int
) -> Operands:
    """The operands, of `cast` for each direction that is asked for; square blocks are cast once."""
    if dot_products == length:
        return asked_for(cast((length, length)), row, column)
    return Operands(cast((dot_products, length)) if row else None, cast((length, dot_products)) if column else None)


def has_scales_by_columns(block_size: tuple[int, int], row: bool) -> bool:
    """Whether a GPU's dequant_scale of blocks is column-major, as the hardware's matmul reads it.

    Those of row codes in blocks of 1 x n are, and those of square blocks where no row codes are made.
    """
    return block_size[0] == 1 or (block_size[0] == block_size[1] and not row)


def empty_block_scales(hp: Tensor, block_size: tuple[int, int], by_columns: bool) -> list[Tensor]:
    """Memory for the quant_scale and the dequant_scale of the blocks of `hp` [R, C], float32."""
    down, across = block_counts(hp.shape[0], hp.shape[1], block_size)
    quant = hp.new_empty(down, across, dtype=torch.float32)
    if by_columns:
        return [quant, hp.new_empty(across, down, dtype=torch.float32).t()]
    return [quant, torch.empty_like(quant)]


FLAT = 6
"""The tensors of `flattened`."""


def flattened(operands: Operands) -> list[Tensor | None]:
    """Codes, quant_scale and dequant_scale of rows and of columns: each tensor once, as an operation must return them.

    None for what was not asked for, and for what of the column is the row's.
    """
    row, column = operands
    flat: list[Tensor | None] = [None] * FLAT
    if row is not None:
        flat[:3] = row.data, row.quant_scale, row.dequant_scale
    if column is not None and column is not row:
        flat[3] = column.data
        if row is None or column.quant_scale is not row.quant_scale:
            flat[4:] = column.quant_scale, column.dequant_scale
    return flat


def unflattened(flat: Sequence[Any], row: bool, column: bool) -> Operands:
    """The operands of which an operation returned the tensors; those that are absent are of shape (0,)."""
    of_row = Operand(flat[0], flat[2], flat[1]) if row else None
    if not column:
        return Operands(of_row, None)
    if of_row is None or flat[4].shape != (0,):
        return Operands(of_row, Operand(flat[3], flat[5], flat[4]))
    return Operands(of_row, of_row if flat[3].shape == (0,) else Operand(flat[3], *of_row[1:]))
