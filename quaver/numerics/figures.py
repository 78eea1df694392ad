"""The figure of a tensor's casts that a budget compares: decibels for each recipe, robust against outliers.

    figures(grad_output, "grad_output")        {"tensorwise": 25.6, "rowwise": 31.4, ...}

[Note: the lower of two] An outlier has most of a tensor's signal, and floating point keeps its relative error, so the
SQNR of the whole does not see what the outlier's scale does to the rest. The share that underflows does (expected.py).
The figure of a cast is the lower of its SQNR and of the SQNR of a bulk with its underflow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quaver.kernels.operands import Operand
from quaver.linear.quantize import Quantizer, as_matrix
from quaver.numerics.expected import bulk_db
from quaver.numerics.extras import RECIPES
from quaver.numerics.sites import OPERANDS, is_shared
from quaver.numerics.statistics import finish, observe_matrix
from quaver.recipes.config import resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts


def figure(sqnr_db: float | None, underflow: float | None) -> float | None:
    """The lower of two, in decibels: see [Note: the lower of two]. None for a tensor of zeros."""
    return None if sqnr_db is None else min(sqnr_db, bulk_db(underflow or 0.0))


@torch.no_grad()
def figures(hp: Tensor, operand: str, recipes: Iterable[str] = RECIPES) -> dict[str, float | None]:
    """The figure of a tensor under each of `recipes`: of the worse of its two casts; infinite without a cast.

    Args:
        hp: [..., columns], float32, bfloat16 or float16.
        operand: "input", "weight" or "grad_output".
    Raises:
        ValueError: another operand or dtype, an unknown recipe, or one with delayed scaling.
    """
    if operand not in OPERANDS:
        raise ValueError(f"operand: expected one of {', '.join(OPERANDS)}, got {operand!r}")
    if hp.dtype not in HP_DTYPES:
        raise ValueError(f"hp: expected one of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype}")
    by_casts: dict[OperandCasts, float | None] = {}
    found = {}
    for recipe in recipes:
        casts: OperandCasts = getattr(resolve_config(recipe).casts, operand)
        if casts.row.is_persistent or casts.column.is_persistent:
            raise ValueError(f"recipe {recipe!r} scales by a history, which a tensor alone has not")
        if casts not in by_casts:
            by_casts[casts] = _figure_of(as_matrix(hp.detach()), casts)
        found[recipe] = by_casts[casts]
    return found


def _figure_of(matrix: Tensor, casts: OperandCasts) -> float | None:
    row, column = Quantizer(casts, matrix.dtype)(matrix, row=True, column=not is_shared(casts))
    found = [_of_cast(matrix, made) for made in (row, column) if made is not None and made.dequant_scale is not None]
    return None if None in found else min((each for each in found if each is not None), default=float("inf"))


def _of_cast(matrix: Tensor, made: Operand) -> float | None:
    slot = observe_matrix(matrix, made)
    values = finish(slot[None].cpu(), [None])
    return figure(values["sqnr_db"][0], values["underflow"][0])
