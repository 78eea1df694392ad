"""`quaver doctor --model RUN|HF-FOLDER [--data TEXT] [--budget-db 25] [--output TOML] [--emulate-sums-of h100]`.

The table has the worst linears first. `--output` writes the chosen recipes as a config, which `LayerRecipes.read` and,
if it can train the model, `quaver train` read. `--emulate-sums-of` adds a table of the precision that the GPU's sums
lose.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import tomli_w
from rich.table import Table

from quaver.lab.cli.doctor_options import DoctorOptions
from quaver.lab.cli.doctor_sums import iter_sum_views
from quaver.lab.doctor.linear_survey import SurveyedLinear
from quaver.lab.doctor.model_survey import ModelSurvey, survey_model
from quaver.lab.doctor.survey_source import SurveyedModel, open_surveyed_model
from quaver.lab.output_file import RECIPES_COMMENT, check_option_files, replace_output
from quaver.lab.plan.changes import with_precision
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.runtime.errors import InputError

SHOWN_RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""The recipes with a column of the table; --json has all."""


def survey_and_write(options: DoctorOptions, model: str) -> ModelSurvey:
    """Survey a model, and write its recipes. Raises OSError, InputError and NotImplementedError for bad input."""
    check_option_files(options, output="TOML of recipes")
    with show_progress("surveying the model"):
        surveyed = open_surveyed_model(
            Path(model), data=options.data, sequences=options.sequences, seq_len=options.seq_len
        )
        survey = survey_model(surveyed, budget_db=options.budget_db, emulate_sums_of=options.emulate_sums_of)
    if options.output is not None:
        _write_recipes(Path(options.output), surveyed, survey)
    return survey


def _write_recipes(output: Path, surveyed: SurveyedModel, survey: ModelSurvey) -> None:
    if not survey.float8_share:
        raise InputError(
            f"--budget-db: expected decibels that a linear reaches, got {survey.budget_db:g}; nothing would be in "
            "float8, so --output has nothing to write"
        )
    config = with_precision(surveyed.config, survey.recipes.recipe)
    float8 = replace(config.float8, layer_recipes=survey.recipes.entries)
    sections = asdict(replace(config, float8=float8)) if surveyed.can_train else {"float8": asdict(float8)}
    comment = f"{RECIPES_COMMENT} --model: at least {survey.budget_db:g} dB for each operand of each linear.\n"
    with replace_output(output) as partial:
        partial.write_text(comment + tomli_w.dumps(sections), encoding="utf-8")


def iter_views(survey: ModelSurvey, output: str | None) -> Iterator[str | Table]:
    """Yield the table of the surveyed linears, the recipes that were chosen, and what was not surveyed."""
    yield f"one batch: {survey.data}; decibels of the worst operand, and which that is"
    columns = ("linear\n  its worst operand; recipe", *SHOWN_RECIPES)
    rows = [_make_row(survey, linear) for linear in survey.linears]
    yield make_table(None, columns, rows=rows, wrapped=columns[:1], right=SHOWN_RECIPES)
    others = len(survey.recipes.layers)
    exceptions = (
        f"{format_count(others, 'layer')} in other recipes or high precision"
        if others
        else "no layer in another recipe"
    )
    yield (
        f"recipes for at least {survey.budget_db:g} dB: {survey.recipes.recipe}, {exceptions}; "
        f"{survey.float8_share:.1%} of the linears' FLOPs in float8"
    )
    if survey.not_surveyed:
        recipe = survey.get_recipe(survey.not_surveyed[0]).replace("_", " ")
        yield (
            f"not surveyed: {format_count(len(survey.not_surveyed), 'layer')} of experts, in {recipe}: "
            f"{', '.join(survey.not_surveyed)}"
        )
    if survey.sums_of is not None:
        yield from iter_sum_views(survey.sums, survey.sums_of)
    if output is not None:
        yield f"saved {output}"


def _make_row(survey: ModelSurvey, linear: SurveyedLinear) -> tuple[str, ...]:
    operand, _ = linear.find_worst(survey.preferred)
    figures = (f"{linear.find_worst(recipe)[1]:.1f}" for recipe in SHOWN_RECIPES)
    return f"{linear.name}\n  {operand}; {survey.get_recipe(linear.name)}", *figures
