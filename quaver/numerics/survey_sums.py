"""The error of a GPU's sums in each matmul of a model, beside that of its casts: for `quaver doctor --hardware`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quaver.linear.quantize import Quantizer, as_matrix
from quaver.numerics.accumulation import Accumulation
from quaver.numerics.matmul_sums import Rows, Sums, observe_sums, some_rows
from quaver.numerics.survey import hooked
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS, OperandCasts


@dataclass(frozen=True)
class MatmulSums:
    """One matmul, and how its config adds."""

    name: str
    """The linear's."""
    matmul: str
    sums: Sums
    use_fast_accum: bool

    @property
    def used(self) -> float:
        return self.sums.used(self.use_fast_accum)

    @property
    def margin(self) -> float:
        """By how much the sums lose less than they may; negative where they cost more than the casts."""
        return self.used - self.sums.bound()


@dataclass
class _LinearSums:
    config: Float8LinearConfig
    numbers: dict[str, Tensor] = field(default_factory=dict)


def survey_sums(
    model: nn.Module,
    forward_backward: Callable[[], Any],
    config_of: Callable[[str], Float8LinearConfig | None],
    rule: Accumulation,
) -> list[MatmulSums]:
    """Run `forward_backward` once; each float8 matmul of each `nn.Linear`, those with the smallest margin first.

    The model computes in its own precision; operands are cast beside it. Those of several calls of a linear add up.
    Matmuls that the hardware does not run in float8 are left out.

    Args:
        config_of: by the name of a linear, how it will be cast; None for high precision. Scales must be dynamic.
    """
    found: dict[str, _LinearSums] = {}

    def observe(name: str, linear: nn.Module, input: Tensor, output: Tensor) -> None:
        config = config_of(name)
        if config is None or config.emulate:
            return
        of_linear = found.setdefault(name, _LinearSums(config))
        weight = linear.get_parameter("weight")
        rows: dict[tuple[str, str], Rows] = {}
        for operand, hp in (("input", input), ("weight", weight)):
            rows |= _rows_of(hp.detach().to(output.dtype), operand, config)
        is_run = {"output": True, "grad_input": input.requires_grad, "grad_weight": weight.requires_grad}

        def backward(grad_output: Tensor) -> None:
            of_all = rows | _rows_of(grad_output.detach(), "grad_output", config)
            _add(of_linear, of_all, [name for name in MATMULS if is_run[name]], rule)

        output.register_hook(backward)

    with hooked(model, observe):
        forward_backward()
    made = [
        MatmulSums(name, matmul, sums, getattr(each.config.matmuls, matmul).use_fast_accum)
        for name, each in found.items()
        for matmul, numbers in each.numbers.items()
        if (sums := Sums.of(numbers.tolist())) is not None
    ]
    return sorted(made, key=lambda each: each.margin)


@torch.no_grad()
def _rows_of(hp: Tensor, operand: str, config: Float8LinearConfig) -> dict[tuple[str, str], Rows]:
    """The rows that each matmul reads of an operand, by operand and direction."""
    casts: OperandCasts = getattr(config.casts, operand)
    matrix = as_matrix(hp)
    made = Quantizer(casts, matrix.dtype)(matrix, row=True, column=True)
    return {
        (operand, direction): some_rows(matrix, of_cast, direction)
        for direction, of_cast in (("row", made.row), ("column", made.column))
        if of_cast is not None and of_cast.dequant_scale is not None
    }


def _add(linear: _LinearSums, rows: dict[tuple[str, str], Rows], matmuls: Iterable[str], rule: Accumulation) -> None:
    for matmul in matmuls:
        left, right = (rows.get(each) for each in MATMULS[matmul])
        if left is not None and right is not None:
            numbers = observe_sums(left, right, rule)
            linear.numbers[matmul] = linear.numbers.get(matmul, 0) + numbers
