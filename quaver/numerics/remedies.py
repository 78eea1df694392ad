"""Remedies for a tensor that alarms: other recipes by the SQNR that its cast has under them, then high precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quaver.numerics.expected import bulk_db
from quaver.numerics.seen import Sample, TensorStatistics

EXACT_ACCUMULATION = "use_fast_accum=False"
"""The setting of `Float8GemmConfig`, and of the trainer's [float8]."""

SAME_CODES = "iter_float8_weights(model, recipe=, rounded_from=)"
"""Hands a rollout the codes that the trainer's forward multiplies."""

WORTH_DB = 1.0
"""A recipe that gains less is no remedy."""


def remedies(seen: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """Recipes that gain `WORTH_DB` or more, best first, with their numbers; at the end high precision and its cost."""
    now = None if seen.sqnr_db is None else min(seen.sqnr_db, bulk_db(seen.underflow or 0.0))
    tried = {recipe: values[seen.position] for recipe, values in sample.recipes.items()}
    found: list[dict[str, Any]] = [
        {"recipe": recipe, "sqnr_db": round(value, 2), "gain_db": round(value - now, 2)}
        for recipe, value in tried.items()
        if value is not None and now is not None and math.isfinite(value) and value - now >= WORTH_DB
    ]
    found.sort(key=lambda remedy: -remedy["gain_db"])
    share = flops_share(seen.key.layer, sample)
    high_precision = {"recipe": "high precision"} | ({} if share is None else {"flops_share": round(share, 4)})
    return (*found, high_precision)


def no_remedies(seen: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """No remedy, for a cause that no setting of quaver ends."""
    return ()


def remedies_of_sums(seen: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """Exact accumulation, where the matmul has not got it and gains by it; high precision where that is too little."""
    sums = sample.sums[seen.position]
    gain = sums.exact - sums.fast
    found: list[dict[str, Any]] = []
    if seen.about.get("use_fast_accum") and gain >= WORTH_DB:
        found.append({"recipe": EXACT_ACCUMULATION, "sqnr_db": sums.exact, "gain_db": round(gain, 2)})
    if not found or sums.exact < sums.bound():
        share = flops_share(seen.key.layer, sample)
        found.append({"recipe": "high precision"} | ({} if share is None else {"flops_share": round(share, 4)}))
    return tuple(found)


def remedies_of_mismatch(seen: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """The codes of the trainer's forward in the rollout."""
    return ({"recipe": SAME_CODES},)


def flops_share(layer: str, sample: Sample) -> float | None:
    """The share of a layer in the FLOPs of all: an M x K by K x N matmul has (MK * KN * MN) ** 0.5 products."""
    products = {name: _products(operands) for name, operands in sample.by_layer.items()}
    own, total = products.get(layer), sum(value or 0.0 for value in products.values())
    return own / total if own and total else None


def _products(operands: Mapping[str, list[TensorStatistics]]) -> float | None:
    sizes = [operands[name][0].numel for name in ("input", "weight", "output") if operands.get(name)]
    known = [size for size in sizes if size]
    return math.sqrt(math.prod(known)) if len(known) == 3 else None


def said(found: tuple[dict[str, Any], ...]) -> str:
    """The remedies of an alarm as a part of its sentence."""
    words = [f"{each['recipe']} gives {each['sqnr_db']:.1f} dB" for each in found if "sqnr_db" in each]
    words += [
        f"high precision costs {each['flops_share']:.1%} of the linears' FLOPs"
        for each in found
        if "flops_share" in each
    ]
    words += [f"{SAME_CODES} hands over the trainer's codes" for each in found if each["recipe"] == SAME_CODES]
    return "; ".join(words)
