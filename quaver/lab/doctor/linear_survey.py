"""Surveys the SQNR of each linear's operands under each recipe, and chooses a recipe per layer for an SQNR budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from quaver.conversion.layer_recipes import HIGH_PRECISION, LayerRecipes
from quaver.numerics.extra_statistics import DYNAMIC_RECIPES, compute_what_if
from quaver.recipes.linear_casts import MATMULS
from quaver.roofline.scaled_matmul import find_scale_kinds
from quaver.runtime.errors import InputError


@dataclass
class SurveyedLinear:
    """One linear. `sqnr_db[recipe][operand]` is the lowest `compute_what_if` of the operand's casts over all calls."""

    name: str
    multiply_adds: int = 0
    """M * K * N of one matmul, summed over calls."""
    sqnr_db: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, operand: str, db_by_recipe: Mapping[str, float | None]) -> None:
        """Add a call's SQNRs of an operand. None, for an operand of zeros, counts as infinite."""
        for recipe, value in db_by_recipe.items():
            operands = self.sqnr_db.setdefault(recipe, {})
            operands[operand] = min(operands.get(operand, math.inf), math.inf if value is None else value)

    def find_worst(self, recipe: str) -> tuple[str, float]:
        """Return the operand with the lowest SQNR under a recipe, and that SQNR in dB."""
        return min(self.sqnr_db[recipe].items(), key=lambda item: item[1])

    def choose_recipe(self, budget_db: float, recipes: Sequence[str]) -> str:
        """Return the first of `recipes` whose operands all reach the budget, else high precision."""
        return next((recipe for recipe in recipes if self.find_worst(recipe)[1] >= budget_db), HIGH_PRECISION)


def survey_linears(model: nn.Module, forward_backward: Callable[[], Any]) -> list[SurveyedLinear]:
    """Run `forward_backward` once and survey every `nn.Linear` of `model` that it calls, in the order of the calls.

    The model computes in high precision, and its operands are cast for the survey. The gradients of the call remain.

    Raises:
        InputError: no linear was called with gradients.
    """
    linears: dict[str, SurveyedLinear] = {}
    with hook_linears(model, partial(_observe_linear, linears)):
        forward_backward()
    surveyed = [
        linear for linear in linears.values() if all("grad_output" in operands for operands in linear.sqnr_db.values())
    ]
    if not surveyed:
        raise InputError(
            "expected a model whose linears get gradients, got none: no nn.Linear ran forward and backward"
        )
    return surveyed


@contextmanager
def hook_linears(model: nn.Module, observe: Callable[[str, nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the name, input and output of every `nn.Linear` that runs and gets gradients."""

    def hook(name: str, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            observe(name, linear, inputs[0], output)

    handles = [
        module.register_forward_hook(partial(hook, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe_linear(
    linears: dict[str, SurveyedLinear], name: str, linear: nn.Module, input: Tensor, output: Tensor
) -> None:
    weight = linear.get_parameter("weight")
    surveyed = linears.setdefault(name, SurveyedLinear(name))
    surveyed.multiply_adds += input.numel() * weight.shape[0]
    for operand, hp in (("input", input), ("weight", weight)):
        surveyed.add(operand, compute_what_if(hp.to(output.dtype), operand, DYNAMIC_RECIPES, direction="both"))

    def observe_gradient(grad_output: Tensor) -> None:
        surveyed.add("grad_output", compute_what_if(grad_output, "grad_output", DYNAMIC_RECIPES, direction="both"))

    output.register_hook(observe_gradient)


def choose_recipes(
    budget_db: float,
    surveyed: Sequence[SurveyedLinear],
    is_skipped: Callable[[str], bool],
    preferred: str = "tensorwise",
    experts: Sequence[str] = (),
) -> LayerRecipes:
    """Choose, for each linear that is not skipped, the recipe with most float8 whose operands reach `budget_db`.

    Args:
        preferred: the recipe that is tried first.
        experts: names of layers that were not surveyed. They get the recipe of most linears, or stay in high precision
            if no linear reaches the budget.
    """
    order = sorted(DYNAMIC_RECIPES, key=lambda recipe: (recipe != preferred, -len(find_scale_kinds(recipe))))
    chosen = {linear.name: linear.choose_recipe(budget_db, order) for linear in surveyed if not is_skipped(linear.name)}
    in_float8 = [recipe for recipe in chosen.values() if recipe != HIGH_PRECISION]
    if not in_float8:
        return LayerRecipes(preferred, dict.fromkeys((*chosen, *experts), HIGH_PRECISION))
    most_frequent = max(order, key=in_float8.count)
    return LayerRecipes(most_frequent, {name: recipe for name, recipe in chosen.items() if recipe != most_frequent})


def compute_float8_share(
    recipes: LayerRecipes, surveyed: Sequence[SurveyedLinear], is_skipped: Callable[[str], bool], backward: str
) -> float:
    """Return the share of the linears' FLOPs that run in float8 with `backward`, a value of float8.backward."""
    total = sum(linear.multiply_adds for linear in surveyed)
    in_float8 = 0.0
    for linear in surveyed:
        recipe = HIGH_PRECISION if is_skipped(linear.name) else recipes.get_recipe(linear.name)
        if recipe != HIGH_PRECISION:
            in_float8 += linear.multiply_adds * len(find_scale_kinds(f"{recipe}:{backward}")) / len(MATMULS)
    return in_float8 / total if total else 0.0
