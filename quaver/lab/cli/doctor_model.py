"""`quaver doctor --model RUN|HF-FOLDER [--data TEXT] [--budget-db 25] [--out recipes.toml] [--hardware h100]`.

Runs one batch forward and backward in high precision, and casts each operand of each linear by every recipe. The table
has the worst linears first. The chosen recipes meet the SQNR budget with as many float8 FLOPs as possible. `--out`
writes them as a config, which `LayerRecipes.read` reads, and `quaver train` too if it can train the model. `--hardware`
runs the batch again for a second table: the precision that the GPU's sums lose in each matmul.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from rich.table import Table

from quaver.conversion.layer_recipes import HIGH_PRECISION, LayerRecipes
from quaver.experts.module import is_experts
from quaver.lab.cli.doctor_options import DoctorOptions
from quaver.lab.cli.doctor_sums import iter_sum_views, make_sums_dict
from quaver.lab.doctor.survey import SurveyedLinear, choose_recipes, compute_float8_share, survey
from quaver.lab.doctor.survey_sums import MatmulSums, survey_sums
from quaver.lab.output_file import Output, check_outputs, replace_output
from quaver.lab.plan.changes import with_precision
from quaver.lab.terminal.tables import make_table
from quaver.lab.trainer.float8 import make_linear_config
from quaver.lab.trainer.surveyed import Surveyed, open_surveyed
from quaver.numerics.accumulation import get_accumulation
from quaver.numerics.extras import DYNAMIC_RECIPES
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.sqnr import replace_inf
from quaver.runtime.errors import InputError

SHOWN = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""The recipes with a column of the table; --json has all."""


@dataclass(frozen=True)
class Survey:
    """The findings of `quaver doctor` on a model."""

    surveyed: list[SurveyedLinear]
    """Sorted by the lowest SQNR under `preferred`."""
    recipes: LayerRecipes
    preferred: str
    """The run's own recipe, or tensorwise."""
    budget_db: float
    float8_share: float
    skipped: list[str]
    not_surveyed: list[str]
    """The layers of experts."""
    data: str
    out: Path | None
    hardware: str | None
    sums: list[MatmulSums]
    """Sorted by the precision lost to the sums of `hardware`; empty without it."""

    def get_recipe(self, name: str) -> str:
        """Return the recipe of a linear, or "skipped"."""
        return "skipped" if name in self.skipped else self.recipes.get_recipe(name)


def survey_model(path: str, options: DoctorOptions) -> Survey:
    """Survey a model, and write its recipes. Raises OSError, InputError and NotImplementedError for bad input."""
    out = None if options.out is None else Path(options.out)
    if out is not None and out.exists():
        raise FileExistsError(f"--out must be a new file, got {str(out)!r}, which exists")
    if out is not None:
        check_outputs(Output(out, "--out", "TOML file"))
    opened = open_surveyed(Path(path), data=options.data, sequences=options.sequences, seq_len=options.seq_len)
    run_recipe = opened.config.float8.recipe_name
    preferred = run_recipe if run_recipe in DYNAMIC_RECIPES else "tensorwise"
    surveyed = survey(opened.model, opened.forward_backward)
    layers = opened.model.named_modules()
    experts = [name for name, module in layers if is_experts(module) and not opened.is_skipped(name)]
    recipes = choose_recipes(options.budget_db, surveyed, opened.is_skipped, preferred, experts)
    share = compute_float8_share(recipes, surveyed, opened.is_skipped, opened.config.float8.backward)
    if out is not None:
        if not share:
            raise InputError(
                f"--budget-db: expected decibels that a linear reaches, got {options.budget_db:g}; nothing would be in "
                "float8, so --out has nothing to write"
            )
        with replace_output(out, "--out") as partial:
            partial.write_text(_format_toml(opened, recipes, options.budget_db), encoding="utf-8")
    surveyed.sort(key=lambda linear: linear.find_worst(preferred)[1])
    skipped = [linear.name for linear in surveyed if opened.is_skipped(linear.name)]
    sums = [] if options.hardware is None else _survey_sums(opened, recipes, options.hardware)
    return Survey(
        surveyed,
        recipes,
        preferred,
        budget_db=options.budget_db,
        float8_share=share,
        skipped=skipped,
        not_surveyed=experts,
        data=opened.data,
        out=out,
        hardware=options.hardware,
        sums=sums,
    )


def _survey_sums(opened: Surveyed, recipes: LayerRecipes, hardware: str) -> list[MatmulSums]:
    """Survey the sums of the linears under their recipes and the run's settings."""

    def make_config(name: str) -> Float8LinearConfig | None:
        recipe = HIGH_PRECISION if opened.is_skipped(name) else recipes.get_recipe(name)
        return None if recipe == HIGH_PRECISION else make_linear_config(opened.config.float8, recipe)

    return survey_sums(opened.model, opened.forward_backward, make_config, get_accumulation(hardware))


def _format_toml(opened: Surveyed, recipes: LayerRecipes, budget_db: float) -> str:
    config = with_precision(opened.config, recipes.recipe)
    float8 = replace(config.float8, layer_recipes=recipes.entries)
    comment = f"# Written by quaver doctor --model: at least {budget_db:g} dB for each operand of each linear.\n"
    if opened.can_train:
        return comment + tomli_w.dumps(asdict(replace(config, float8=float8)))
    return comment + tomli_w.dumps({"float8": asdict(float8)})


def iter_views(result: Survey) -> Iterator[str | Table]:
    """Yield the table of the surveyed linears, the recipes that were chosen, and what was not surveyed."""
    yield f"one batch: {result.data}; decibels of the worst operand, and which that is"
    columns = ("linear\n  its worst operand; recipe", *SHOWN)
    rows = [_make_row(result, linear) for linear in result.surveyed]
    yield make_table(None, columns, rows=rows, wrapped=columns[:1], right=SHOWN)
    yield (
        f"at least {result.budget_db:g} dB: {result.recipes.recipe}, and {len(result.recipes.layers)} layers "
        f"otherwise; {result.float8_share:.1%} of the linears' FLOPs in float8"
    )
    if result.not_surveyed:
        recipe = result.get_recipe(result.not_surveyed[0]).replace("_", " ")
        yield (
            f"not surveyed: {len(result.not_surveyed)} layers of experts, which get {recipe}: "
            f"{', '.join(result.not_surveyed)}"
        )
    if result.hardware is not None:
        yield from iter_sum_views(result.sums, result.hardware)
    if result.out is not None:
        yield f"written: {result.out}"


def _make_row(result: Survey, linear: SurveyedLinear) -> tuple[str, ...]:
    operand, _ = linear.find_worst(result.preferred)
    figures = (f"{linear.find_worst(recipe)[1]:.1f}" for recipe in SHOWN)
    return f"{linear.name}\n  {operand}; {result.get_recipe(linear.name)}", *figures


def make_survey_dict(result: Survey) -> dict[str, Any]:
    """Return all numbers for JSON."""
    total = sum(linear.multiply_adds for linear in result.surveyed)
    return {
        "data": result.data,
        "budget_db": result.budget_db,
        "recipe": result.recipes.recipe,
        "float8_share": result.float8_share,
        "not_surveyed": result.not_surveyed,
        "linears": [
            {
                "name": linear.name,
                "recipe": result.get_recipe(linear.name),
                "flops_share": linear.multiply_adds / total,
                "db": {recipe: replace_inf(decibels) for recipe, decibels in linear.db.items()},
            }
            for linear in result.surveyed
        ],
        **(
            {}
            if result.hardware is None
            else {"hardware": result.hardware, "sums": [make_sums_dict(matmul) for matmul in result.sums]}
        ),
    }
