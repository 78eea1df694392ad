"""What some linears of a sample have besides statistics: histograms of casts, and their SQNR under other recipes.

Both are sums, [WIDTH] per cast, which micro-batches, ranks and `extras_of` add up:

    before     how many elements of `HISTOGRAM_ROWS` rows have each float32 exponent, [256]
    after      the same of their codes, in the operand's units, [256]
    signal     [1]
    noises     of the cast that each of `RECIPES` would make, [recipes]; 0 where it keeps high precision
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.config import Float8LinearConfig, Float8LinearRecipeName, OperandCasts
from quaver.numerics.expected import bulk_db
from quaver.numerics.places import OPERANDS
from quaver.numerics.record import encode_counts
from quaver.numerics.statistics import Place, Values, observe_matrix, sqnr_db
from quaver.quantize import Quantizer, as_matrix, present
from quaver.scaling import multiply_scale_, scale_blocks

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
WIDTH = _SIGNAL + 1 + len(RECIPES)


def what_if(
    hp: Tensor, operand: str, recipes: Iterable[str | Float8LinearRecipeName] = RECIPES, *, direction: str = "row"
) -> dict[str, float | None]:
    """The SQNR in dB of the casts that other recipes would make of a matrix; where much underflows, that of the bulk.

    Args:
        hp: [..., columns], float32, bfloat16 or float16.
        operand: which one of a linear it is: "input", "weight" or "grad_output".
        recipes: their names.
        direction: "row" for the cast of the matmul that contracts its last dim, "column" for the other.
    Returns:
        By recipe; infinite where it keeps the operand in high precision, None for a matrix without a nonzero element.
    Raises:
        ValueError: an operand, a direction or a recipe that there is not, or one with persistent scales.
    """
    if operand not in OPERANDS or direction not in ("row", "column"):
        raise ValueError(f"expected an operand of {OPERANDS} and row or column, got {operand!r} and {direction!r}")
    names = [Float8LinearRecipeName(name).value for name in recipes]
    for name in names:
        if name not in CONFIGS:
            raise ValueError(f"recipes: {name} scales by earlier steps, which a matrix alone does not tell")
    signal, noises = _noises(as_matrix(hp), operand, direction, names)
    if not signal:
        return dict.fromkeys(names)
    return {name: float(sqnr_db(np.array(signal), np.array(noise))) for name, noise in zip(names, noises, strict=True)}


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
            codes, dequant, quant = present(operands.row or operands.column)
            slot = observe_matrix(hp, codes, dequant, quant)
            made[key], signal = _noise_of(slot), slot[Place.SIGNAL].item()
        noises.append(made[key])
    return signal, noises


def _noise_of(slot: Tensor) -> float:
    """That of a cast, or of its bulk where an outlier hides how much of it underflows: see figures.py."""
    nonzero = slot[Place.NUMEL] - slot[Place.NONFINITE] - slot[Place.ZEROS]
    underflow = (slot[Place.UNDERFLOW] / nonzero.clamp(min=1)).item()
    return max(slot[Place.NOISE].item(), slot[Place.SIGNAL].item() * 10 ** (-bulk_db(underflow) / 10))


def extras_of(hp: Tensor, codes: Tensor, dequant_scale: Tensor, operand: str, direction: str) -> Tensor:
    """The sums of one cast, float64 [WIDTH]; `hp` and `codes` are [rows, columns]."""
    extras = torch.zeros(WIDTH, dtype=torch.float64, device=hp.device)
    if not hp.numel():
        return extras
    rows = torch.arange(min(HISTOGRAM_ROWS, len(hp)), device=hp.device) * len(hp) // min(HISTOGRAM_ROWS, len(hp))
    extras[:_EXPONENTS] = _exponents(hp[rows])
    extras[_EXPONENTS:_SIGNAL] = _exponents(multiply_scale_(codes[rows].float(), _scale_of(rows, dequant_scale, hp)))
    signal, noises = _noises(hp, operand, direction, RECIPES)
    extras[_SIGNAL:] = torch.tensor([signal, *noises], dtype=torch.float64)
    return extras


def _scale_of(rows: Tensor, scale: Tensor, hp: Tensor) -> Tensor:
    """The scales of some rows, as a scale of the matrix that they are."""
    if scale.dim() == 0 or scale.shape[0] == 1:
        return scale
    height, _ = scale_blocks(scale, hp.shape) or (1, 1)
    return scale[rows // height]


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
    signal, noises = extras[:, _SIGNAL], extras[:, _SIGNAL + 1 :]
    has_signal: list[bool] = np.greater(signal, 0).tolist()
    decibels = {name: sqnr_db(signal, noises[:, column]) for column, name in enumerate(RECIPES)}
    return {
        "histogram": {"low": first - _BIAS, "bins": last - first, "before": before, "after": after},
        "whatif": {
            name: [round(value, 2) if has else None for value, has in zip(values.tolist(), has_signal, strict=True)]
            for name, values in decibels.items()
        },
    }
