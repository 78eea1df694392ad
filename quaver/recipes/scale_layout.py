"""`ScaleLayout`: which elements of a matrix share a scale. Whoever holds float8 codes holds this value with them.

    granularity         layout of row codes      scales of a matrix [R, C]
    tensorwise          ALL x ALL                ()
    rowwise             1 x ALL                  [R, 1]
    blockwise r x c     r x c                    [ceil(R / r), ceil(C / c)]

Column codes, which a matmul reads along their columns, have blocks that are turned. Blocks tile a matrix from its first
element; those at its last row and column may be smaller. Codes of four bits share a byte with their neighbour in the
row, whichever way blocks lie; in a transposed view with their neighbour in the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes.formats import E2M1

ALL = 0
"""As a number of rows or columns that share a scale: all of them."""


class ScaleLayout(NamedTuple):
    """The rows and columns of a matrix that share a scale, `ALL` of them or a number; and those that share a byte."""

    rows: int
    columns: int
    rows_of_byte: int = 1
    columns_of_byte: int = 1

    def t(self) -> ScaleLayout:
        """The layout of the transposed matrix."""
        return ScaleLayout(self.columns, self.rows, self.columns_of_byte, self.rows_of_byte)

    def turned(self) -> ScaleLayout:
        """The layout of column codes where this is that of row codes: scales run the other way, bytes lie alike."""
        return ScaleLayout(self.columns, self.rows, self.rows_of_byte, self.columns_of_byte)

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.rows_of_byte * self.columns_of_byte > 1

    def size_of(self, codes: Tensor) -> tuple[int, int]:
        """The rows and columns of a matrix of codes."""
        return codes.shape[-2] * self.rows_of_byte, codes.shape[-1] * self.columns_of_byte

    def shape_of_codes(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of the codes of a tensor of `size`, the last two dims of which are a matrix.

        Raises:
            ValueError: elements that share a byte do not fill it.
        """
        *stack, rows, columns = size
        if rows % self.rows_of_byte or columns % self.columns_of_byte:
            raise ValueError(f"codes of four bits share a byte: expected rows of an even length, got {list(size)}")
        return *stack, rows // self.rows_of_byte, columns // self.columns_of_byte

    @property
    def is_tensorwise(self) -> bool:
        """Whether all elements share one scale."""
        return self.rows == self.columns == ALL

    @property
    def is_blockwise(self) -> bool:
        """Whether neither rows nor columns share a scale from end to end."""
        return ALL not in self

    def block(self, size: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block of a matrix of `size`, both at least 1."""
        return self.rows or max(size[0], 1), self.columns or max(size[1], 1)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of a matrix [rows, columns]."""
        if self.is_tensorwise:
            return ()
        return -(-rows // self.rows) if self.rows else 1, -(-columns // self.columns) if self.columns else 1

    def varies_along(self, dim: int, size: Sequence[int]) -> bool:
        """Whether a matmul that contracts `dim` of a matrix of `size` cannot apply its scales to the result.

        They differ along `dim`, or several rows (or columns) of the result share one without all of them doing so.
        """
        if self.is_tensorwise:
            return False
        counts = self.scale_shape(size[0], size[1])
        return counts[dim] != 1 or counts[1 - dim] != size[1 - dim]

    def __str__(self) -> str:
        """ "tensorwise", "rowwise", "columnwise" or "blockwise ROWS x COLUMNS"."""
        names = {TENSORWISE: "tensorwise", ROWWISE: "rowwise", COLUMNWISE: "columnwise"}
        return names.get(self) or f"blockwise {self.rows} x {self.columns}"


TENSORWISE = ScaleLayout(ALL, ALL)
ROWWISE = ScaleLayout(1, ALL)
COLUMNWISE = ScaleLayout(ALL, 1)

BLOCK_SIZE = 128
"""The rows and columns of a block of DeepSeek's checkpoints."""

SQUARE_BLOCKS = ScaleLayout(BLOCK_SIZE, BLOCK_SIZE)

BLOCK_SIZES = ((128, 128), (1, 128), (32, 32), (1, 32))
"""The supported sizes of blocks of row codes."""

PACKED_BLOCK_SIZES = ((16, 16), (1, 16))
"""Those of codes of four bits."""


def layout_of_blocks(dtype: torch.dtype, rows: int, columns: int) -> ScaleLayout:
    """The layout of row codes of `dtype` in blocks; codes of four bits share a byte with their neighbour in the row."""
    return ScaleLayout(rows, columns, 1, 2 if dtype is E2M1.dtype else 1)


def layout_of(scale: Tensor, size: Sequence[int]) -> ScaleLayout:
    """The layout of a scale that comes without one, of a matrix of `size`.

    Blocks have the lengths of `BLOCK_SIZES`. No two of these lengths cut a dim into as many blocks, unless each of them
    spans the dim; then both mean the same. A part of a matrix says nothing about the blocks of the whole.

    Raises:
        ValueError: `scale` has another shape.
    """
    if scale.dim() == 0:
        return TENSORWISE
    lengths = [_length_of(count, n) for count, n in zip(scale.shape, size, strict=False)]
    if scale.dim() != 2 or len(size) != 2 or None in lengths:
        shapes = {layout: list(layout.scale_shape(size[0], size[1])) for layout in _KNOWN}
        blocks = ", ".join(f"{shape} ({layout})" for layout, shape in shapes.items())
        raise ValueError(
            f"expected a scale of shape [] (tensorwise), {blocks} or such transposed for a matrix of {list(size)}, got "
            f"{list(scale.shape)}"
        )
    layout = ScaleLayout(*(length or ALL for length in lengths))
    return ScaleLayout(size[0], size[1]) if layout.is_tensorwise else layout  # [1, 1]: one block


_KNOWN = (ROWWISE, COLUMNWISE, *(ScaleLayout(*size) for size in BLOCK_SIZES))
_LENGTHS = sorted({1, *(length for block in BLOCK_SIZES for length in block)})


def _length_of(count: int, elements: int) -> int | None:
    """How many of the elements along a dim share one of `count` scales; None for a count that no layout has."""
    if count == 1 != elements:
        return ALL
    return next((length for length in _LENGTHS if count == -(-elements // length)), None)
