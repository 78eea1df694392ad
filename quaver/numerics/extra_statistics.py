"""Computes costly statistics of some linears per sample: histograms, SQNR under other recipes, errors of a GPU's sums.

All are sums, [EXTRAS_WIDTH] per cast, which add up over microbatches and ranks.

    before     how many elements of `HISTOGRAM_ROWS` rows have each float32 exponent, [256]
    after      how many of their dequantized codes have each exponent, [256]
    signal     [1]
    noises     the noise of each recipe's cast, in the order of `DYNAMIC_RECIPES`; 0 if the recipe keeps high precision
    sums       the numbers of a result's sums on a GPU, [SUMS_WIDTH]; 0 if no GPU is emulated
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.kernels.operands import Operand, require
from quaver.linear.quantize import Quantizer, flatten_to_matrix
from quaver.numerics.accumulation import Accumulation
from quaver.numerics.error_bounds import compute_bulk_db
from quaver.numerics.matmul_sums import SUMS_WIDTH, MatmulSqnrs, SampledRows, observe_sums
from quaver.numerics.record import Float64Array, encode_counts
from quaver.numerics.statistics import TallyIndex, compute_ratio_db, observe_matrix, spread_indices
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import LinearCasts, OperandCasts
from quaver.recipes.scaling import multiply_scale_

_EXPONENTS, _BIAS = 256, 127
HISTOGRAM_ROWS = 256
"""Evenly spread rows of each cast that a histogram counts."""

CONFIG_BY_RECIPE = {
    name.value: config
    for name in Float8LinearRecipeName
    if not (config := Float8LinearConfig.from_recipe_name(name)).has_persistent_scales
}
DYNAMIC_RECIPES = tuple(CONFIG_BY_RECIPE)
"""The recipes with dynamic scaling. Delayed scaling is at best as good as tensorwise."""

_SIGNAL = 2 * _EXPONENTS
_NOISES = _SIGNAL + 1
_SUMS = _NOISES + len(DYNAMIC_RECIPES)
EXTRAS_WIDTH = _SUMS + SUMS_WIDTH


def compute_what_if(
    hp: Tensor,
    operand: str,
    recipes: Iterable[str | Float8LinearRecipeName] = DYNAMIC_RECIPES,
    *,
    direction: str = "row",
) -> dict[str, float | None]:
    """Compute the SQNR in dB that a matrix has when other recipes cast it.

    An outlier has most of a matrix's signal, and floating point keeps its relative error. The SQNR of the matrix
    therefore hides what the outlier's scale does to the other elements, but the share that underflows shows it
    (error_bounds.py). The lower of the two SQNRs is returned.

    Args:
        hp: [..., columns], float32, bfloat16 or float16.
        operand: the operand of a linear: "input", "weight" or "grad_output".
        recipes: names of recipes.
        direction: "row" for the cast of the matmul that contracts the last dim, "column" for the cast of the other
            matmul, "both" for the worse of the two.
    Returns:
        The SQNR by recipe: infinite if the recipe keeps the operand in high precision. None if all finite elements are
        zero.
    Raises:
        ValueError: a number, an unknown operand, direction, dtype or recipe, or a recipe with persistent scales.
    """
    directions = {"row": ("row",), "column": ("column",), "both": ("row", "column")}.get(direction)
    if operand not in LinearCasts._fields or directions is None:
        expected = f"an operand of {LinearCasts._fields} and row, column or both"
        raise ValueError(f"expected {expected}, got {operand!r}, {direction!r}")
    if hp.dtype not in HP_DTYPES:
        raise ValueError(f"hp: expected one of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype}")
    names = [Float8LinearRecipeName(name).value for name in recipes]
    for name in names:
        if name not in CONFIG_BY_RECIPE:
            raise ValueError(f"recipes: expected recipes with dynamic scaling, got {name!r}")
    if not hp.dim():
        raise ValueError("hp: expected [..., columns], got a number")
    matrix = flatten_to_matrix(hp.detach())
    if not (matrix.isfinite() & (matrix != 0)).any():
        return dict.fromkeys(names)
    measured = [_measure_noises(matrix, operand, matmul, names) for matmul in directions]
    decibels = [compute_ratio_db(np.array(signal), np.array(noises)) for signal, noises in measured]
    return dict(zip(names, np.min(decibels, axis=0).tolist(), strict=True))


def _measure_noises(hp: Tensor, operand: str, direction: str, names: Iterable[str]) -> tuple[float, list[float]]:
    """Measure the signal of a matrix and the noise of each recipe's cast. Recipes share equal casts."""
    noise_by_cast: dict[Any, float] = {}
    signal, noises = 0.0, []
    for name in names:
        casts: OperandCasts = getattr(CONFIG_BY_RECIPE[name].casts, operand)
        cast = casts.row if direction == "row" else casts.column
        key = cast, casts.power_of_2
        if key not in noise_by_cast and cast.is_disabled:
            noise_by_cast[key] = 0.0
        elif key not in noise_by_cast:
            alone = OperandCasts(cast, cast, casts.power_of_2, has_equal_casts=True)
            operands = Quantizer(alone, hp.dtype)(hp, row=direction == "row", column=direction == "column")
            tally = observe_matrix(hp, require(operands.row or operands.column, "the operand"))
            noise_by_cast[key], signal = _get_noise(tally), tally[TallyIndex.SIGNAL].item()
        noises.append(noise_by_cast[key])
    return signal, noises


def _get_noise(tally: Tensor) -> float:
    """Return the larger of a cast's noise and the noise that its underflow implies; see `compute_what_if`."""
    nonzero = tally[TallyIndex.NUMEL] - tally[TallyIndex.NONFINITE] - tally[TallyIndex.ZEROS]
    underflow = (tally[TallyIndex.UNDERFLOW] / nonzero.clamp(min=1)).item()
    return max(
        tally[TallyIndex.NOISE].item(), tally[TallyIndex.SIGNAL].item() * 10 ** (-compute_bulk_db(underflow) / 10)
    )


def compute_extras(hp: Tensor, cast: Operand, operand: str, direction: str) -> Tensor:
    """Compute the sums of one cast of `hp` [rows, columns], float64 [EXTRAS_WIDTH]."""
    extras = torch.zeros(EXTRAS_WIDTH, dtype=torch.float64, device=hp.device)
    if not hp.numel():
        return extras
    rows = spread_indices(len(hp), HISTOGRAM_ROWS, hp.device)
    extras[:_EXPONENTS] = _count_exponents(hp[rows])
    codes, scale, layout, *_ = cast.select_rows(rows)
    extras[_EXPONENTS:_SIGNAL] = _count_exponents(multiply_scale_(codes.float(), require(scale, "the scale"), layout))
    signal, noises = _measure_noises(hp, operand, direction, DYNAMIC_RECIPES)
    extras[_SIGNAL:_SUMS] = torch.tensor([signal, *noises], dtype=torch.float64, device=hp.device)
    return extras


def compute_result_extras(left: SampledRows, right: SampledRows, accumulation: Accumulation) -> Tensor:
    """Compute the sums of one matmul, float64 [EXTRAS_WIDTH]."""
    extras = torch.zeros(EXTRAS_WIDTH, dtype=torch.float64, device=left.hp.device)
    extras[_SUMS:] = observe_sums(left, right, accumulation)
    return extras


def _count_exponents(values: Tensor) -> Tensor:
    """Count the values with each biased exponent, [256]."""
    exponents = values.float().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    return torch.bincount(exponents.flatten(), minlength=_EXPONENTS)


def summarize_extras(extras: Float64Array) -> dict[str, Any]:
    """Return the fields "histogram" and "whatif" of a sample from [rows, EXTRAS_WIDTH]. Rows of zeros have None."""
    counts = extras[:, :_SIGNAL].reshape(-1, 2, _EXPONENTS)
    counts[:, :, [0, -1]] = 0  # float32's zeros and subnormals, and non-finite values
    used = np.flatnonzero(counts.sum((0, 1)))
    has_counts: list[bool] = np.any(counts, axis=(1, 2)).tolist()
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (_BIAS, _BIAS + 1)
    before, after = (
        [encode_counts(row[first:last]) if has else None for row, has in zip(side, has_counts, strict=True)]
        for side in (counts[:, 0], counts[:, 1])
    )
    signal, noises = extras[:, _SIGNAL], extras[:, _NOISES:_SUMS]
    has_signal: list[bool] = np.greater(signal, 0).tolist()
    decibels = {name: compute_ratio_db(signal, noises[:, column]) for column, name in enumerate(DYNAMIC_RECIPES)}
    return {
        "histogram": {"low": first - _BIAS, "bins": last - first, "before": before, "after": after},
        "whatif": {
            name: [round(value, 2) if has else None for value, has in zip(values.tolist(), has_signal, strict=True)]
            for name, values in decibels.items()
        },
    }


def summarize_sums(extras: Float64Array) -> dict[str, list[float | None]]:
    """Return the field "sums" of a sample from [rows, EXTRAS_WIDTH]: decibels by name, None for a row of zeros."""
    column = [MatmulSqnrs.from_values(row) for row in extras[:, _SUMS:].tolist()]
    return {
        name: [None if sums is None else round(getattr(sums, name), 2) for sums in column]
        for name in MatmulSqnrs._fields
    }
