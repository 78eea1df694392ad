"""The casts of the three operands of a linear, in both directions, and the options of its three matmuls."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from quaver.recipes.cast_config import CastConfig, ScalingType

MATMULS = {
    "output": (("input", "row"), ("weight", "row")),
    "grad_input": (("grad_output", "row"), ("weight", "column")),
    "grad_weight": (("grad_output", "column"), ("input", "column")),
}
"""Each matmul's left and right operand, and the direction in which it reads them."""

BACKWARD_MATMULS = ("grad_input", "grad_weight")


class OperandCasts(NamedTuple):
    """How one operand is quantized for each of its two matmuls; linear/quantize.py has a picture of the directions."""

    row: CastConfig
    """For the matmul whose dot products run along the operand's rows: it contracts the last dim."""
    column: CastConfig
    """For the matmul whose dot products run along the operand's columns: it contracts the first dim."""
    power_of_2: bool
    """Whether quant_scales are rounded down to powers of two."""

    is_one: bool
    """Whether both directions are cast alike, so that one read of the operand can serve both."""
    is_dequantized: bool = False
    """Whether the column operand is the row operand, and is dequantized for a matmul in high precision."""

    @property
    def is_float8(self) -> bool:
        """Whether both directions read float8 codes."""
        return not (self.row.is_disabled or (self.column.is_disabled and not self.is_dequantized))

    @property
    def of_column(self) -> CastConfig:
        """The cast that makes the column operand."""
        return self.row if self.is_dequantized else self.column

    @property
    def has_one_set(self) -> bool:
        """Whether one set of codes and scales serves both directions."""
        return self.is_dequantized or (self.is_one and not self.row.has_two_casts)


def disabled(cast: CastConfig) -> CastConfig:
    """The cast of an operand that stays in high precision, in place of `cast`."""
    return CastConfig(ScalingType.DISABLED, target_dtype=cast.target_dtype)


class LinearCasts(NamedTuple):
    """The casts of the three operands. Each matmul reads two of them: see `MATMULS`."""

    input: OperandCasts
    weight: OperandCasts
    grad_output: OperandCasts

    def of(self, operand: str, direction: str) -> CastConfig:
        """`casts.<operand>.<direction>`."""
        cast: CastConfig = getattr(getattr(self, operand), direction)
        return cast

    def made_by(self, operand: str, direction: str) -> CastConfig:
        """The cast that makes what one matmul reads, which is `of` unless that is dequantized."""
        casts: OperandCasts = getattr(self, operand)
        return casts.row if direction == "row" else casts.of_column

    def in_high_precision(self, matmuls: Collection[str], *, dequantized: bool = False) -> LinearCasts:
        """The casts where some of `MATMULS` run in high precision.

        `dequantized`: their column operands of input and weight are the row operands, dequantized.
        """
        if not matmuls:
            return self
        off = {operand for matmul in matmuls for operand in MATMULS[matmul]}

        def operand(name: str, casts: OperandCasts) -> OperandCasts:
            row, column = (
                disabled(cast) if (name, direction) in off else cast
                for direction, cast in (("row", casts.row), ("column", casts.column))
            )
            reads_row = casts.is_dequantized or (dequantized and name != "grad_output")
            return OperandCasts(row, column, casts.power_of_2, row == column and not reads_row, reads_row)

        return LinearCasts(*(operand(name, casts) for name, casts in zip(self._fields, self, strict=True)))

    def every(self) -> tuple[CastConfig, ...]:
        """All six, row before column."""
        return tuple(cast for operand in self for cast in operand[:2])

    @property
    def has_blocks(self) -> bool:
        """Whether any operand is scaled in blocks."""
        return any(cast.is_blockwise for cast in self.every())


class MatmulOptions(NamedTuple):
    """How one matmul of a linear runs, for `gemm.mm`."""

    use_fast_accum: bool = False
    """On float8 hardware only: fewer bits in Hopper's partial sums."""
    scales_are_powers_of_2: bool = False
    """A promise that every scale is one; the exact backend is then faster."""
    emulate: bool = False
    """Take the exact backend wherever this runs."""
    pad: bool = False
    """Bring K and N to multiples of 16 on the exact backend too. The result is the same."""


class LinearMatmuls(NamedTuple):
    """The options of the three matmuls."""

    output: MatmulOptions
    grad_input: MatmulOptions
    grad_weight: MatmulOptions
