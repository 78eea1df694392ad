"""Surveys a model: the SQNR of each linear's operands under each recipe, and a recipe per layer under a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from quaver.conversion.layer_recipes import HIGH_PRECISION, LayerRecipes
from quaver.numerics.extras import RECIPES, what_if
from quaver.recipes.config import Float8LinearConfig


@dataclass
class SurveyedLinear:
    """One linear: `db[recipe][operand]` is `what_if` of the worse of its casts, the lowest of all its calls."""

    name: str
    products: int = 0
    """M * K * N of its matmuls, added up over calls."""
    db: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, operand: str, found: Mapping[str, float | None]) -> None:
        """Note an operand; one of zeros loses nothing."""
        for recipe, value in found.items():
            of_recipe = self.db.setdefault(recipe, {})
            of_recipe[operand] = min(of_recipe.get(operand, math.inf), math.inf if value is None else value)

    def worst(self, recipe: str) -> tuple[str, float]:
        """The operand that loses most under a recipe, and its decibels."""
        return min(self.db[recipe].items(), key=lambda item: item[1])

    def best(self, budget_db: float, recipes: Sequence[str]) -> str:
        """The first of `recipes` that keeps the budget; else high precision."""
        return next((recipe for recipe in recipes if self.worst(recipe)[1] >= budget_db), HIGH_PRECISION)


def survey(
    model: nn.Module, forward_backward: Callable[[], Any], recipes: Sequence[str] = RECIPES
) -> list[SurveyedLinear]:
    """Run `forward_backward` once and survey every `nn.Linear` of `model` that it calls, in the order of the calls.

    The model computes in its own precision; operands are cast beside it. Gradients are left as the call makes them.

    Raises:
        ValueError: no linear was called with gradients.
    """
    found: dict[str, SurveyedLinear] = {}
    with hooked(model, partial(_observe, found, recipes)):
        forward_backward()
    surveyed = [each for each in found.values() if all("grad_output" in of for of in each.db.values())]
    if not surveyed:
        raise ValueError(
            "expected a model whose linears get gradients, got none: no nn.Linear ran forward and backward"
        )
    return surveyed


@contextmanager
def hooked(model: nn.Module, observe: Callable[[str, nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the name, input and output of every `nn.Linear` that runs and gets gradients."""

    def of_linear(name: str, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            observe(name, linear, inputs[0], output)

    handles = [
        module.register_forward_hook(partial(of_linear, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe(
    found: dict[str, SurveyedLinear],
    recipes: Sequence[str],
    name: str,
    linear: nn.Module,
    input: Tensor,
    output: Tensor,
) -> None:
    """One call of a linear."""
    weight = linear.get_parameter("weight")
    surveyed = found.setdefault(name, SurveyedLinear(name))
    surveyed.products += input.numel() * weight.shape[0]
    for operand, hp in (("input", input), ("weight", weight)):
        surveyed.add(operand, what_if(hp.to(output.dtype), operand, recipes, direction="both"))
    output.register_hook(
        lambda grad: surveyed.add("grad_output", what_if(grad, "grad_output", recipes, direction="both"))
    )


# ---- the recipes -----------------------------------------------------------------------------------------------------


def by_float8(first: str, recipes: Sequence[str] = RECIPES) -> list[str]:
    """`recipes`, `first` in front, then by how many of the three matmuls they compute in float8."""

    def order(recipe: str) -> tuple[bool, int]:
        casts = Float8LinearConfig.from_recipe_name(recipe).casts
        return recipe != first, sum(each.column.is_disabled for each in casts)

    return sorted(recipes, key=order)


def recipes_under(
    budget_db: float, surveyed: Sequence[SurveyedLinear], skipped: Callable[[str], bool], first: str = "tensorwise"
) -> LayerRecipes:
    """For each linear that is not `skipped`, the recipe with most float8 that keeps `budget_db` for each operand."""
    order = by_float8(first)
    chosen = {each.name: each.best(budget_db, order) for each in surveyed if not skipped(each.name)}
    used = [recipe for recipe in chosen.values() if recipe != HIGH_PRECISION]
    rest = max(order, key=used.count) if used else first
    return LayerRecipes(rest, {name: recipe for name, recipe in chosen.items() if recipe != rest})


def float8_share(recipes: LayerRecipes, surveyed: Sequence[SurveyedLinear], skipped: Callable[[str], bool]) -> float:
    """The share of the linears' FLOPs that are float8 matmuls."""
    total = sum(each.products for each in surveyed)
    in_float8 = 0.0
    for each in surveyed:
        recipe = HIGH_PRECISION if skipped(each.name) else recipes.of(each.name)
        if recipe != HIGH_PRECISION:
            casts = Float8LinearConfig.from_recipe_name(recipe).casts
            in_float8 += each.products * (3 - any(casts_of.column.is_disabled for casts_of in casts)) / 3
    return in_float8 / total if total else 0.0
