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


def name_cast(operand: str, direction: str) -> str:
    """Return a cast's name in the fields of `Float8LinearConfig`, such as "weight" or "weight_for_grad_input"."""
    readers = {read: matmul for matmul, operands in MATMULS.items() for read in operands}
    return operand if direction == "row" else f"{operand}_for_{readers[operand, direction]}"


BACKWARD_MATMULS = ("grad_input", "grad_weight")


class OperandCasts(NamedTuple):
    """How one operand is quantized for each of its two matmuls; linear/quantize.py has a picture of the directions."""

    row: CastConfig
    """The cast for the matmul whose dot products run along the operand's rows: it contracts the last dim."""
    column: CastConfig
    """The cast for the matmul whose dot products run along the operand's columns: it contracts the first dim."""
    power_of_2: bool
    """Whether quant_scales are rounded down to powers of two."""

    has_equal_casts: bool
    """Whether both directions have the same cast, so that one read of the operand can serve both."""
    is_dequantized: bool = False
    """Whether the column operand is the row operand, dequantized for a matmul in high precision."""

    @property
    def directions(self) -> tuple[CastConfig, CastConfig]:
        """Both casts, row before column."""
        return self.row, self.column

    @property
    def is_float8(self) -> bool:
        """Whether both directions read float8 codes."""
        return not (self.row.is_disabled or (self.column.is_disabled and not self.is_dequantized))

    @property
    def column_source(self) -> CastConfig:
        """The cast whose codes the column operand reads."""
        return self.row if self.is_dequantized else self.column

    @property
    def shares_codes(self) -> bool:
        """Whether one set of codes and scales serves both directions."""
        return self.is_dequantized or (self.has_equal_casts and not self.row.depends_on_direction)


def disable_cast(cast: CastConfig) -> CastConfig:
    """Return the cast of an operand that stays in high precision, with the dtype of `cast`."""
    return CastConfig(ScalingType.DISABLED, target_dtype=cast.target_dtype)


class LinearCasts(NamedTuple):
    """The casts of the three operands. Each matmul reads two of them: see `MATMULS`."""

    input: OperandCasts
    weight: OperandCasts
    grad_output: OperandCasts

    def get(self, operand: str, direction: str) -> CastConfig:
        """Return `casts.<operand>.<direction>`."""
        return getattr(getattr(self, operand), direction)

    def get_source(self, operand: str, direction: str) -> CastConfig:
        """Return the cast whose codes a matmul reads: `get`, or the row cast if the column operand is dequantized."""
        casts: OperandCasts = getattr(self, operand)
        return casts.row if direction == "row" else casts.column_source

    def disable_matmuls(self, matmuls: Collection[str], *, dequantized: bool = False) -> LinearCasts:
        """Return the casts with some of `MATMULS` in high precision.

        `dequantized`: these matmuls read the dequantized row operands of input and weight.
        """
        if not matmuls:
            return self
        disabled = {operand for matmul in matmuls for operand in MATMULS[matmul]}

        def disable_operand(name: str, casts: OperandCasts) -> OperandCasts:
            row, column = (
                disable_cast(cast) if (name, direction) in disabled else cast
                for direction, cast in (("row", casts.row), ("column", casts.column))
            )
            reads_row = casts.is_dequantized or (dequantized and name != "grad_output")
            return OperandCasts(row, column, casts.power_of_2, row == column and not reads_row, reads_row)

        return LinearCasts(*(disable_operand(name, casts) for name, casts in zip(self._fields, self, strict=True)))

    def list_casts(self) -> tuple[CastConfig, ...]:
        """Return the six casts, by operand, row before column."""
        return tuple(cast for operand in self for cast in operand.directions)

    @property
    def has_blocks(self) -> bool:
        """Whether any operand has blockwise scales."""
        return any(cast.is_blockwise for cast in self.list_casts())


class MatmulOptions(NamedTuple):
    """How one matmul of a linear runs, for `gemm.multiply_operands`."""

    use_fast_accum: bool = False
    """On float8 hardware only: fewer bits in Hopper's partial sums."""
    scales_are_powers_of_2: bool = False
    """Whether every scale is a power of two; the exact backend is then faster."""
    emulate: bool = False
    """Use the exact backend on every device."""
    pad: bool = False
    """Pad K and N to multiples of 16 on the exact backend too. The result is the same."""


class LinearMatmuls(NamedTuple):
    """The options of the three matmuls."""

    output: MatmulOptions
    grad_input: MatmulOptions
    grad_weight: MatmulOptions
