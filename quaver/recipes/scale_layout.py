"""`ScaleLayout`: which elements of a matrix share a scale, and which share a byte. Every operand carries one.

    granularity         layout of row codes      scales of a matrix [R, C]
    tensorwise          ALL x ALL                ()
    rowwise             1 x ALL                  [R, 1]
    blockwise r x c     r x c                    [ceil(R / r), ceil(C / c)]

A matmul along the rows reads row codes; a matmul along the columns reads column codes, whose blocks are transposed.
Blocks tile a matrix from its first element, so blocks at the last row and column may be smaller. A 4-bit code shares a
byte with its neighbor in the row, in both layouts. In a transposed view it shares a byte with its neighbor in the
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes.formats import E2M1

ALL = 0
"""The `rows` or `columns` of a `ScaleLayout` whose scales span the whole dim."""


class ScaleLayout(NamedTuple):
    """The number of rows and columns of a matrix that share a scale (or `ALL`), and that share a byte."""

    rows: int
    columns: int
    rows_of_byte: int = 1
    columns_of_byte: int = 1

    def t(self) -> ScaleLayout:
        """Return the layout of the transposed matrix."""
        return ScaleLayout(self.columns, self.rows, self.columns_of_byte, self.rows_of_byte)

    def get_column_layout(self) -> ScaleLayout:
        """Return the layout of column codes whose row codes have this layout: transposed blocks, the same bytes."""
        return ScaleLayout(self.columns, self.rows, self.rows_of_byte, self.columns_of_byte)

    @property
    def block_size(self) -> tuple[int, int]:
        """The rows and columns that share a scale; `ALL` for a whole dim."""
        return self.rows, self.columns

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.rows_of_byte * self.columns_of_byte > 1

    def get_matrix_size(self, codes: Tensor) -> tuple[int, int]:
        """Return the rows and columns of the matrix that `codes` hold."""
        return codes.shape[-2] * self.rows_of_byte, codes.shape[-1] * self.columns_of_byte

    def get_codes_shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the codes of a tensor [..., rows, columns] of `size`.

        Raises:
            ValueError: the last byte of a row would be half empty.
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
        """Whether a scale spans neither a whole row nor a whole column."""
        return ALL not in self

    def get_block_shape(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a block in a matrix of `size`, both at least 1."""
        rows = max(size[0], 1) if self.rows == ALL else self.rows
        return rows, max(size[1], 1) if self.columns == ALL else self.columns

    def get_scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix [rows, columns]."""
        if self.is_tensorwise:
            return ()
        return _count_blocks(rows, self.rows), _count_blocks(columns, self.columns)

    def varies_along(self, dim: int, size: Sequence[int]) -> bool:
        """Return whether a matmul that contracts `dim` of a matrix of `size` must scale the operand, not the result.

        True where scales differ along `dim`, or where some rows (or columns) of the result share a scale and others
        do not.
        """
        if self.is_tensorwise:
            return False
        counts = self.get_scale_shape(size[0], size[1])
        return counts[dim] != 1 or counts[1 - dim] != size[1 - dim]

    def __str__(self) -> str:
        """Return "tensorwise", "rowwise", "columnwise" or "blockwise ROWS x COLUMNS"."""
        names = {TENSORWISE: "tensorwise", ROWWISE: "rowwise", COLUMNWISE: "columnwise"}
        return names.get(self) or f"blockwise {self.rows} x {self.columns}"


TENSORWISE = ScaleLayout(ALL, ALL)
ROWWISE = ScaleLayout(1, ALL)
COLUMNWISE = ScaleLayout(ALL, 1)

BLOCK_SIZE = 128
"""The rows and columns of a block of DeepSeek's checkpoints."""

SQUARE_BLOCKS = ScaleLayout(BLOCK_SIZE, BLOCK_SIZE)

BLOCK_SIZES = ((128, 128), (1, 128), (32, 32), (1, 32))
"""The supported block sizes of row codes."""

PACKED_BLOCK_SIZES = ((16, 16), (1, 16))
"""The supported block sizes of 4-bit row codes."""


def make_block_layout(dtype: torch.dtype, rows: int, columns: int) -> ScaleLayout:
    """Return the layout of row codes of `dtype` in blocks of `rows` x `columns`."""
    return ScaleLayout(rows, columns, 1, 2 if dtype is E2M1.dtype else 1)


def infer_layout(scale: Tensor, size: Sequence[int]) -> ScaleLayout:
    """Infer the layout of a scale from its shape and the `size` of its matrix.

    Blocks have the lengths of `BLOCK_SIZES`. Two block lengths give the same number of blocks only if neither is
    shorter than the dim, and then they are equivalent. Do not call this for a part of a matrix, whose first block may
    be incomplete.

    Raises:
        ValueError: no layout gives a scale of this shape.
    """
    if scale.dim() == 0:
        return TENSORWISE
    inferred = [_infer_length(count, n) for count, n in zip(scale.shape, size, strict=False)]
    lengths = [length for length in inferred if length is not None]
    if scale.dim() != 2 or len(size) != 2 or len(lengths) < 2:
        shapes = {layout: list(layout.get_scale_shape(size[0], size[1])) for layout in _INFERRED_LAYOUTS}
        blocks = ", ".join(f"{shape} ({layout})" for layout, shape in shapes.items())
        raise ValueError(
            f"expected a scale of shape [] (tensorwise), {blocks} or their transposes for a matrix of {list(size)}, "
            f"got {list(scale.shape)}"
        )
    layout = ScaleLayout(*lengths)
    return ScaleLayout(size[0], size[1]) if layout.is_tensorwise else layout  # [1, 1]: one block


_INFERRED_LAYOUTS = (ROWWISE, COLUMNWISE, *(ScaleLayout(*size) for size in BLOCK_SIZES))
_INFERRED_LENGTHS = sorted({1, *(length for block in BLOCK_SIZES for length in block)})


def _count_blocks(elements: int, length: int) -> int:
    return 1 if length == ALL else -(-elements // length)


def _infer_length(count: int, elements: int) -> int | None:
    """Return the block length that cuts a dim of `elements` into `count` blocks, `ALL` for one block, or None."""
    if count == 1 != elements:
        return ALL
    return next((length for length in _INFERRED_LENGTHS if count == -(-elements // length)), None)
