"""Surveys a model for `quaver doctor --model`, and chooses the recipes that meet an SQNR budget.

One batch runs forward and backward in high precision, and each operand of each linear is cast by every recipe. The
chosen recipes meet the budget with as many float8 FLOPs as possible. With `emulate_sums_of` the batch runs again, for
the precision that a GPU's sums lose in each matmul.
"""

from dataclasses import dataclass
from typing import Any

from quaver.conversion.layer_recipes import HIGH_PRECISION, LayerRecipes
from quaver.experts.module import is_experts
from quaver.lab.doctor.linear_survey import SurveyedLinear, choose_recipes, compute_float8_share, survey_linears
from quaver.lab.doctor.sum_survey import MatmulSums, survey_sums
from quaver.lab.doctor.survey_source import SurveyedModel
from quaver.lab.model.float8 import make_linear_config
from quaver.numerics.accumulation import get_accumulation
from quaver.numerics.extra_statistics import DYNAMIC_RECIPES
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.sqnr import replace_inf


@dataclass(frozen=True)
class ModelSurvey:
    """The findings of `quaver doctor --model`."""

    linears: list[SurveyedLinear]
    """Sorted by the lowest SQNR under `preferred`."""
    recipes: LayerRecipes
    preferred: str
    """The run's own recipe, or tensorwise."""
    budget_db: float
    float8_share: float
    """The share of the linears' FLOPs that run in float8 under `recipes`."""
    skipped: list[str]
    not_surveyed: list[str]
    """The layers of experts."""
    data: str
    sums_of: str | None
    sums: list[MatmulSums]
    """Sorted by the precision lost to the sums of that GPU; empty without it."""

    def get_recipe(self, name: str) -> str:
        """Return the recipe of a linear, or "skipped"."""
        return "skipped" if name in self.skipped else self.recipes.get_recipe(name)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        total = sum(linear.multiply_adds for linear in self.linears)
        linears = [
            {
                "name": linear.name,
                "recipe": self.get_recipe(linear.name),
                "flops_share": linear.multiply_adds / total,
                "db": {recipe: replace_inf(decibels) for recipe, decibels in linear.sqnr_db.items()},
            }
            for linear in self.linears
        ]
        sums = {"sums_of": self.sums_of, "sums": [matmul.to_dict() for matmul in self.sums]}
        return {
            "data": self.data,
            "budget_db": self.budget_db,
            "recipe": self.recipes.recipe,
            "float8_share": self.float8_share,
            "not_surveyed": self.not_surveyed,
            "linears": linears,
            **(sums if self.sums_of else {}),
        }


def survey_model(surveyed: SurveyedModel, *, budget_db: float, emulate_sums_of: str | None = None) -> ModelSurvey:
    """Survey the linears of a model, and choose their recipes.

    Args:
        budget_db: the SQNR that each operand of a linear in float8 must reach.
        emulate_sums_of: a key of `quaver.numerics.accumulation.ACCUMULATION_BY_GPU`, whose sums are surveyed too.
    Raises:
        InputError: no linear runs forward and backward.
    """
    run_recipe = surveyed.config.float8.recipe_name
    preferred = run_recipe if run_recipe in DYNAMIC_RECIPES else "tensorwise"
    linears = survey_linears(surveyed.model, surveyed.forward_backward)
    layers = surveyed.model.named_modules()
    experts = [name for name, module in layers if is_experts(module) and not surveyed.is_skipped(name)]
    recipes = choose_recipes(budget_db, linears, surveyed.is_skipped, preferred, experts)
    return ModelSurvey(
        sorted(linears, key=lambda linear: linear.find_worst(preferred)[1]),
        recipes,
        preferred,
        budget_db=budget_db,
        float8_share=compute_float8_share(recipes, linears, surveyed.is_skipped, surveyed.config.float8.backward),
        skipped=[linear.name for linear in linears if surveyed.is_skipped(linear.name)],
        not_surveyed=experts,
        data=surveyed.data,
        sums_of=emulate_sums_of,
        sums=[] if emulate_sums_of is None else _survey_sums(surveyed, recipes, emulate_sums_of),
    )


def _survey_sums(surveyed: SurveyedModel, recipes: LayerRecipes, emulate_sums_of: str) -> list[MatmulSums]:
    """Survey the sums of the linears under their recipes and the run's settings."""

    def make_config(name: str) -> Float8LinearConfig | None:
        recipe = HIGH_PRECISION if surveyed.is_skipped(name) else recipes.get_recipe(name)
        return None if recipe == HIGH_PRECISION else make_linear_config(surveyed.config.float8, recipe)

    return survey_sums(surveyed.model, surveyed.forward_backward, make_config, get_accumulation(emulate_sums_of))
