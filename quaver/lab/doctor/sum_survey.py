"""Compares the errors of a GPU's sums and of the casts in each matmul, for `quaver doctor --emulate-sums-of`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quaver.lab.doctor.linear_survey import hook_linears
from quaver.linear.quantize import Quantizer, flatten_to_matrix
from quaver.numerics.accumulation import Accumulation
from quaver.numerics.matmul_sums import MatmulSqnrs, SampledRows, observe_sums, sample_rows
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS, OperandCasts
from quaver.recipes.sqnr import replace_inf


@dataclass(frozen=True)
class MatmulSums:
    """The sums of one matmul of a linear, and the setting in use."""

    name: str
    """The name of the linear."""
    matmul: str
    sums: MatmulSqnrs
    use_fast_accum: bool

    @property
    def used_db(self) -> float:
        return self.sums.choose_sums_db(use_fast_accum=self.use_fast_accum)

    @property
    def margin_db(self) -> float:
        """Decibels between the sums' SQNR and the lowest acceptable SQNR; negative if the sums are too coarse."""
        return self.used_db - self.sums.compute_bound_db()

    def to_dict(self) -> dict[str, Any]:
        """Return the decibels for JSON, where infinite ones are null."""
        decibels = replace_inf(self.sums._asdict())
        return {"name": self.name, "matmul": self.matmul, "use_fast_accum": self.use_fast_accum, **decibels}


@dataclass
class _LinearSums:
    config: Float8LinearConfig
    sums_by_matmul: dict[str, Tensor] = field(default_factory=dict)


def survey_sums(
    model: nn.Module,
    forward_backward: Callable[[], Any],
    get_config: Callable[[str], Float8LinearConfig | None],
    accumulation: Accumulation,
) -> list[MatmulSums]:
    """Run `forward_backward` once and return the sums of every float8 matmul, the smallest margin first.

    The model computes in high precision, and its operands are cast for the comparison. The calls of a linear add up.
    Matmuls that the GPU does not run in float8 are omitted.

    Args:
        get_config: returns the config of a linear by its name, or None for high precision. Scales must be dynamic.
    """
    surveyed: dict[str, _LinearSums] = {}

    def observe(name: str, linear: nn.Module, input: Tensor, output: Tensor) -> None:
        config = get_config(name)
        if config is None or config.emulate:
            return
        linear_sums = surveyed.setdefault(name, _LinearSums(config))
        weight = linear.get_parameter("weight")
        rows: dict[tuple[str, str], SampledRows] = {}
        for operand, hp in (("input", input), ("weight", weight)):
            rows |= _sample_operand(hp.detach().to(output.dtype), operand, config)
        is_run = {"output": True, "grad_input": input.requires_grad, "grad_weight": weight.requires_grad}

        def observe_gradient(grad_output: Tensor) -> None:
            grad_rows = _sample_operand(grad_output.detach(), "grad_output", config)
            _add_sums(linear_sums, rows | grad_rows, [name for name in MATMULS if is_run[name]], accumulation)

        output.register_hook(observe_gradient)

    with hook_linears(model, observe):
        forward_backward()
    matmuls = [
        MatmulSums(name, matmul, sums, getattr(linear.config.matmuls, matmul).use_fast_accum)
        for name, linear in surveyed.items()
        for matmul, values in linear.sums_by_matmul.items()
        if (sums := MatmulSqnrs.from_values(values.tolist())) is not None
    ]
    return sorted(matmuls, key=lambda matmul: matmul.margin_db)


@torch.no_grad()
def _sample_operand(hp: Tensor, operand: str, config: Float8LinearConfig) -> dict[tuple[str, str], SampledRows]:
    """Sample the rows of an operand that each of its matmuls reads, by operand and direction."""
    casts: OperandCasts = getattr(config.casts, operand)
    matrix = flatten_to_matrix(hp)
    operands = Quantizer(casts, matrix.dtype)(matrix, row=True, column=True)
    return {
        (operand, direction): sample_rows(matrix, cast, direction)
        for direction, cast in (("row", operands.row), ("column", operands.column))
        if cast is not None and cast.dequant_scale is not None
    }


def _add_sums(
    linear: _LinearSums, rows: dict[tuple[str, str], SampledRows], matmuls: Iterable[str], accumulation: Accumulation
) -> None:
    for matmul in matmuls:
        left, right = (rows.get(key) for key in MATMULS[matmul])
        if left is not None and right is not None:
            observed = observe_sums(left, right, accumulation)
            linear.sums_by_matmul[matmul] = linear.sums_by_matmul.get(matmul, 0) + observed
