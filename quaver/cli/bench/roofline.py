"""`quaver bench roofline [options]`: what float8 linears would gain, predicted for GPUs that this machine lacks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table

from quaver.bench.roofline import (
    LINEAR_SHARES,
    Roofline,
    Settings,
    merged_names,
    predict,
    read_measurements,
    recipes_of,
    specs_of,
    to_json,
    write_csv,
)
from quaver.bench.roofline_layers import layers_of_config, layers_of_model
from quaver.bench.roofline_map import draw_map
from quaver.bench.shapes import MODELS
from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import bad_input
from quaver.devices import DEVICE_SPECS
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.float8 import RECIPES
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf
from quaver.trainer.config.settings import Settings as OptionsBase

_Device = Annotated[str, OneOf(tuple(spec.name for spec in DEVICE_SPECS), has_aliases=True)]


@dataclass(frozen=True)
class RooflineOptions(OptionsBase):
    """Predict the speedup of a float8 linear over bfloat16, forward and backward, from data sheets. Needs no GPU."""

    device: tuple[_Device, ...] = ("H200",)
    """GPUs to predict for."""
    recipes: tuple[Annotated[str, OneOf(RECIPES, has_aliases=True)], ...] = ("tensorwise", "rowwise", "delayed")
    """Recipes to predict."""
    tokens: AtLeast1 = 16384
    """M of the models' layers: tokens on one GPU."""
    model: tuple[Annotated[str, OneOf(tuple(MODELS), has_aliases=True)], ...] = ()
    """Models; all by default, or none with --config."""
    config: tuple[str, ...] = ()
    """TOML files of quaver train whose models to predict."""
    microbatches: NotNegative = 0
    """Micro-batches that share the casts of a weight (cast_weights_once); 0: forward and backward cast it each."""
    measured: str | None = None
    """JSON of quaver bench linear on one of the devices, to compare with."""
    pictures: tuple[_Device, ...] | None = None
    """Devices to draw; all of --device by default, no word for none."""
    output: str = "benchmarks/results/roofline"
    """Folder of the CSV, the JSON and the pictures."""


def run(argv: list[str]) -> int:
    """Predict as `argv` says, print the tables, save CSV, JSON and pictures; 0 when done, 2 for bad input."""
    with bad_input():
        options = parse_options(RooflineOptions, argv, prog="quaver bench roofline")
        settings = _settings(options)
        pictured = settings.devices if options.pictures is None else specs_of(options.pictures)
        missing = [spec.name for spec in pictured if spec not in settings.devices]
        if missing:
            raise ValueError(f"--pictures {', '.join(missing)}: expected devices that are in --device")
        measurements = read_measurements(Path(options.measured), settings.devices) if options.measured else []
        output = Path(options.output)
        output.mkdir(parents=True, exist_ok=True)
        roofline = predict(settings, measurements)
        write_csv(roofline, output / "roofline.csv")
        (output / "roofline.json").write_text(json.dumps(to_json(roofline), indent=2) + "\n")
    pictures = [output / f"roofline_{spec.name.lower()}.png" for spec in pictured]
    for spec, picture in zip(pictured, pictures, strict=True):
        draw_map(roofline, spec, picture)
    _print(roofline)
    saved = ", ".join(str(path) for path in (output / "roofline.csv", output / "roofline.json", *pictures))
    print(f"saved {saved}")
    return 0


def _settings(options: RooflineOptions) -> Settings:
    models = [layers_of_model(name) for name in options.model or ([] if options.config else MODELS)]
    models += [layers_of_config(Path(path)) for path in options.config]
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"two models are called {twice}; expected each --model once, and --config files of other names"
        )
    return Settings(
        devices=specs_of(options.device),
        recipes=recipes_of(options.recipes),
        tokens=options.tokens,
        models=tuple(models),
        microbatches=options.microbatches or None,
    )


def _print(roofline: Roofline) -> None:
    console = wide_console(120)
    for spec in roofline.settings.devices:
        console.print(_layers_table(roofline, spec.name))
    console.print(_totals_table(roofline))
    if roofline.comparisons:
        console.print(_comparisons_table(roofline))
    console.print("Predictions from data sheets, and no measurements: docs/performance.md says what they leave out.")


def _layers_table(roofline: Roofline, device: str) -> Table:
    recipes = roofline.settings.recipes
    found = {(row.model, row.layer, row.recipe): row for row in roofline.layers if row.device == device}
    rows = []
    for model in roofline.settings.models:
        for name, (k, n) in merged_names(model).items():
            of_recipes = (found[model.name, name, recipe] for recipe in recipes)
            cells = (
                f"{row.cost.speedup:.2f}" + (f" ({row.measured.speedup:.2f})" if row.measured else "")
                for row in of_recipes
            )
            rows.append((model.name, name, f"{k:,} -> {n:,}", *cells))
    measured = " (measured in parentheses)" if any(row.measured for row in roofline.layers) else ""
    title = f"{device}: predicted speedup at {roofline.settings.tokens:,} tokens{measured}"
    return make_table(title, ("model", "layers", "K -> N", *recipes), rows=rows)


def _totals_table(roofline: Roofline) -> Table:
    title = "All linears of a model; and a step of whose bfloat16 time they take so much, by Amdahl's law"
    columns = ("model", "device", "recipe", "bfloat16", "linears", *(f"{share:.0%}" for share in LINEAR_SHARES))
    rows = []
    for total in roofline.totals:
        speedups = (total.speedup, *map(total.step_speedup, LINEAR_SHARES))
        numbers = (f"{1e3 * total.bfloat16_s:,.0f} ms", *(f"{each:.2f}" for each in speedups))
        rows.append((total.model, total.device, total.recipe, *numbers))
    return make_table(title, columns, rows=rows)


def _comparisons_table(roofline: Roofline) -> Table:
    rows = []
    for each in roofline.comparisons:
        was = each.measurement
        numbers = (f"{each.predicted:.2f}", f"{was.speedup:.2f}", f"{each.error_percent:+.0f}%")
        rows.append((was.device, f"{was.m} x {was.k} x {was.n}", was.recipe, was.mode, *numbers))
    columns = ("device", "M x K x N", "recipe", "mode", "predicted", "measured", "error")
    return make_table("Predicted against measured (weights cast at each use)", columns, rows=rows)
