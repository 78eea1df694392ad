"""Costly statistics that a sample takes of some linears only: histograms of casts, their SQNR under other recipes, and
the SQNR of a GPU's sums.

All are sums, [WIDTH] per cast, which micro-batches, ranks and `extras_of` add up:

    before     how many elements of `HISTOGRAM_ROWS` rows have each float32 exponent, [256]
    after      the same of their codes, in the operand's units, [256]
    signal     [1]
    noises     of the cast that each of `RECIPES` would make, [recipes]; 0 where it keeps high precision
    sums       of a result, what a GPU's sums would lose, [matmul_sums.WIDTH]; 0 without a GPU to compute them for
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.kernels.operands import Operand, present
from quaver.linear.quantize import Quantizer, as_matrix
from quaver.numerics.accumulation import Accumulation
from quaver.numerics.expected import bulk_db
from quaver.numerics.matmul_sums import WIDTH as SUMS_WIDTH
from quaver.numerics.matmul_sums import Rows, Sums, observe_sums
from quaver.numerics.record import encode_counts
from quaver.numerics.statistics import SlotIndex, Values, observe_matrix, spread, sqnr_db
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import LinearCasts, OperandCasts
from quaver.recipes.scaling import multiply_scale_

_EXPONENTS, _BIAS = 256, 127
HISTOGRAM_ROWS = 256
"""Rows of each cast, evenly from the first to the last, that a histogram counts."""

CONFIGS = {
    name.value: config
    for name in Float8LinearRecipeName
    if not (config := Float8LinearConfig.from_recipe_name(name)).has_persistent_scales
}
RECIPES = tuple(CONFIGS)
"""The recipes with dynamic scaling; delayed scaling is tensorwise, at best."""

_SIGNAL = 2 * _EXPONENTS
_NOISES = _SIGNAL + 1
_SUMS = _NOISES + len(RECIPES)
WIDTH = _SUMS + SUMS_WIDTH


def what_if(
    hp: Tensor, operand: str, recipes: Iterable[str | Float8LinearRecipeName] = RECIPES, *, direction: str = "row"
) -> dict[str, float | None]:
    """The SQNR in dB of the casts that other recipes would make of a matrix; where much underflows, that of the bulk.

    An outlier has most of a matrix's signal, and floating point keeps its relative error, so the SQNR of the whole does
    not see what the outlier's scale does to the rest. The share that underflows does (expected.py): the lower of the
    two SQNRs counts.

    Args:
        hp: [..., columns], float32, bfloat16 or float16.
        operand: which one of a linear it is: "input", "weight" or "grad_output".
        recipes: their names.
        direction: "row" for the cast of the matmul that contracts its last dim, "column" for the other, "both" for the
            worse of the two.
    Returns:
        By recipe; infinite where it keeps the operand in high precision, None for a matrix without a nonzero element.
    Raises:
        ValueError: an operand, a direction, a dtype or a recipe that there is not, or one with persistent scales.
    """
    directions = {"row": ("row",), "column": ("column",), "both": ("row", "column")}.get(direction)
    if operand not in LinearCasts._fields or directions is None:
        expected = f"an operand of {LinearCasts._fields} and row, column or both"
        raise ValueError(f"expected {expected}, got {operand!r}, {direction!r}")
    if hp.dtype not in HP_DTYPES:
        raise ValueError(f"hp: expected one of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype}")
    names = [Float8LinearRecipeName(name).value for name in recipes]
    for name in names:
        if name not in CONFIGS:
            raise ValueError(f"recipes: {name} scales by earlier steps, which a matrix alone does not tell")
    matrix = as_matrix(hp.detach())
    if not matrix.any():
        return dict.fromkeys(names)
    found = [_noises(matrix, operand, each, names) for each in directions]
    decibels = [[float(sqnr_db(np.array(signal), np.array(noise))) for noise in noises] for signal, noises in found]
    return dict(zip(names, map(min, zip(*decibels, strict=True)), strict=True))


def _noises(hp: Tensor, operand: str, direction: str, names: Iterable[str]) -> tuple[float, list[float]]:
    """The signal of a matrix and the noise of each recipe's cast; casts that recipes share are made once."""
    made: dict[Any, float] = {}
    signal, noises = 0.0, []
    for name in names:
        casts: OperandCasts = getattr(CONFIGS[name].casts, operand)
        cast = casts.row if direction == "row" else casts.column
        key = cast, casts.power_of_2
        if key not in made and cast.is_disabled:
            made[key] = 0.0
        elif key not in made:
            alone = OperandCasts(cast, cast, casts.power_of_2, is_one=True)
            operands = Quantizer(alone, hp.dtype)(hp, row=direction == "row", column=direction == "column")
            slot = observe_matrix(hp, present(operands.row or operands.column))
            made[key], signal = _noise_of(slot), slot[SlotIndex.SIGNAL].item()
        noises.append(made[key])
    return signal, noises


def _noise_of(slot: Tensor) -> float:
    """The noise of a cast, or of its bulk where an outlier hides how much of it underflows: see `what_if`."""
    nonzero = slot[SlotIndex.NUMEL] - slot[SlotIndex.NONFINITE] - slot[SlotIndex.ZEROS]
    underflow = (slot[SlotIndex.UNDERFLOW] / nonzero.clamp(min=1)).item()
    return max(slot[SlotIndex.NOISE].item(), slot[SlotIndex.SIGNAL].item() * 10 ** (-bulk_db(underflow) / 10))


def extras_of(hp: Tensor, made: Operand, operand: str, direction: str) -> Tensor:
    """The sums of one cast of `hp` [rows, columns], float64 [WIDTH]."""
    extras = torch.zeros(WIDTH, dtype=torch.float64, device=hp.device)
    if not hp.numel():
        return extras
    rows = spread(len(hp), HISTOGRAM_ROWS, hp.device)
    extras[:_EXPONENTS] = _exponents(hp[rows])
    codes, scale, layout, *_ = made.rows(rows)
    extras[_EXPONENTS:_SIGNAL] = _exponents(multiply_scale_(codes.float(), present(scale), layout))
    signal, noises = _noises(hp, operand, direction, RECIPES)
    extras[_SIGNAL:_SUMS] = torch.tensor([signal, *noises], dtype=torch.float64)
    return extras


def extras_of_result(left: Rows, right: Rows, rule: Accumulation) -> Tensor:
    """The sums of one matmul, float64 [WIDTH]."""
    extras = torch.zeros(WIDTH, dtype=torch.float64, device=left.hp.device)
    extras[_SUMS:] = observe_sums(left, right, rule)
    return extras


def _exponents(values: Tensor) -> Tensor:
    """How many of the values have each biased exponent, [256]."""
    exponents = values.float().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    return torch.bincount(exponents.flatten(), minlength=_EXPONENTS)


def describe_extras(extras: Values) -> dict[str, Any]:
    """The fields "histogram" and "whatif" of a sample, from sums [rows, WIDTH]; rows of zeros have neither."""
    counts = extras[:, :_SIGNAL].reshape(-1, 2, _EXPONENTS)
    counts[:, :, [0, -1]] = 0  # zeros with subnormals of float32, and what is not finite
    used = np.flatnonzero(counts.sum((0, 1)))
    seen: list[bool] = np.any(counts, axis=(1, 2)).tolist()
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (_BIAS, _BIAS + 1)
    before, after = (
        [encode_counts(row[first:last]) if is_seen else None for row, is_seen in zip(side, seen, strict=True)]
        for side in (counts[:, 0], counts[:, 1])
    )
    signal, noises = extras[:, _SIGNAL], extras[:, _NOISES:_SUMS]
    has_signal: list[bool] = np.greater(signal, 0).tolist()
    decibels = {name: sqnr_db(signal, noises[:, column]) for column, name in enumerate(RECIPES)}
    return {
        "histogram": {"low": first - _BIAS, "bins": last - first, "before": before, "after": after},
        "whatif": {
            name: [round(value, 2) if has else None for value, has in zip(values.tolist(), has_signal, strict=True)]
            for name, values in decibels.items()
        },
    }


def describe_sums(extras: Values) -> dict[str, list[float | None]]:
    """The field "sums" of a sample, from sums [rows, WIDTH]: decibels by name, None where a row has none."""
    found = [Sums.of(row) for row in extras[:, _SUMS:].tolist()]
    return {name: [None if each is None else round(getattr(each, name), 2) for each in found] for name in Sums._fields}
