"""The casts of the three operands of a linear, in both directions, and the options of its three matmuls."""

from __future__ import annotations

from typing import NamedTuple

from quaver.recipes.cast_config import CastConfig

MATMULS = {
    "output": (("input", "row"), ("weight", "row")),
    "grad_input": (("grad_output", "row"), ("weight", "column")),
    "grad_weight": (("grad_output", "column"), ("input", "column")),
}
"""Each matmul's left and right operand, and the direction in which it reads them."""


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

    @property
    def is_float8(self) -> bool:
        """Whether both directions are float8."""
        return not (self.row.is_disabled or self.column.is_disabled)


class LinearCasts(NamedTuple):
    """The casts of the three operands. Each matmul reads two of them: see `MATMULS`."""

    input: OperandCasts
    weight: OperandCasts
    grad_output: OperandCasts

    def of(self, operand: str, direction: str) -> CastConfig:
        """`casts.<operand>.<direction>`."""
        cast: CastConfig = getattr(getattr(self, operand), direction)
        return cast

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
