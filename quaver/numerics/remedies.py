"""Suggests remedies for a tensor that alarms: other recipes by their SQNR, then high precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quaver.numerics.error_bounds import compute_bulk_db
from quaver.numerics.history import Sample, TensorStatistics
from quaver.runtime.module_names import join_names

EXACT_ACCUMULATION = "use_fast_accum=False"
"""The setting of `Float8GemmConfig`, and of the trainer's [float8]."""

SAME_CODES = "iter_float8_weights(model, recipe=, forward_dtype=)"
"""Gives a rollout the codes that the trainer's forward multiplies."""

SMALLEST_GAIN_DB = 1.0
"""The smallest gain of a remedy."""


def suggest_recipes(tensor: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """Suggest the recipes that gain `SMALLEST_GAIN_DB` or more, best first, then high precision with its cost."""
    current_db = None if tensor.sqnr_db is None else min(tensor.sqnr_db, compute_bulk_db(tensor.underflow or 0.0))
    db_by_recipe = {recipe: values[tensor.position] for recipe, values in sample.whatif.items()}
    remedies: list[dict[str, Any]] = [
        {"recipe": recipe, "sqnr_db": round(db, 2), "gain_db": round(db - current_db, 2)}
        for recipe, db in db_by_recipe.items()
        if db is not None and current_db is not None and math.isfinite(db) and db - current_db >= SMALLEST_GAIN_DB
    ]
    remedies.sort(key=lambda remedy: -round(remedy["gain_db"], 1))  # equal ones in the order of the recipes
    return (*remedies, _suggest_high_precision(tensor.key.layer, sample))


def suggest_accumulation(tensor: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """Suggest exact accumulation if it helps, and high precision if that is not enough."""
    sums = sample.sums[tensor.position]
    gain = sums.exact - sums.fast
    remedies: list[dict[str, Any]] = []
    if tensor.entry.get("use_fast_accum") and gain >= SMALLEST_GAIN_DB:
        remedies.append({"recipe": EXACT_ACCUMULATION, "sqnr_db": sums.exact, "gain_db": round(gain, 2)})
    if not remedies or sums.exact < sums.compute_bound_db():
        remedies.append(_suggest_high_precision(tensor.key.layer, sample))
    return tuple(remedies)


def suggest_same_codes(tensor: TensorStatistics, sample: Sample) -> tuple[dict[str, Any], ...]:
    """Suggest the codes of the trainer's forward for the rollout."""
    return ({"recipe": SAME_CODES},)


def _suggest_high_precision(layer: str, sample: Sample) -> dict[str, Any]:
    share = compute_flops_share(layer, sample)
    return {"recipe": "high precision"} | ({} if share is None else {"flops_share": round(share, 4)})


def compute_flops_share(layer: str, sample: Sample) -> float | None:
    """Return a layer's share of the FLOPs. A matmul of M x K by K x N has (MK * KN * MN) ** 0.5 products."""
    products = {name: _count_products(operands) for name, operands in sample.by_layer.items()}
    layer_products, total = products.get(layer), sum(value or 0.0 for value in products.values())
    return layer_products / total if layer_products and total else None


def _count_products(operands: Mapping[str, list[TensorStatistics]]) -> float | None:
    sizes = [operands[name][0].numel for name in ("input", "weight", "output") if operands.get(name)]
    known_sizes = [size for size in sizes if size]
    return math.sqrt(math.prod(known_sizes)) if len(known_sizes) == 3 else None


def describe_remedies(remedies: tuple[dict[str, Any], ...]) -> str:
    """Describe the remedies of an alarm as a part of its sentence."""
    by_sqnr: dict[str, list[str]] = {}
    for remedy in remedies:
        if "sqnr_db" in remedy:
            by_sqnr.setdefault(f"{remedy['sqnr_db']:.1f} dB", []).append(remedy["recipe"])
    phrases = [
        f"{join_names(recipes)} {'give' if len(recipes) > 1 else 'gives'} {sqnr}" for sqnr, recipes in by_sqnr.items()
    ]
    phrases += [
        f"high precision costs {remedy['flops_share']:.1%} of the linears' FLOPs"
        for remedy in remedies
        if "flops_share" in remedy
    ]
    if any(remedy["recipe"] == SAME_CODES for remedy in remedies):
        phrases.append(f"{SAME_CODES} gives the rollout the trainer's codes")
    return "; ".join(phrases)
