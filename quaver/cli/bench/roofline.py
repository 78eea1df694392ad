"""`quaver bench roofline [options]`: what float8 linears would gain, predicted for GPUs that this machine lacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quaver.bench.roofline import (
    LINEAR_SHARES,
    Roofline,
    RooflineSettings,
    predict,
    recipes_of,
    specs_of,
)
from quaver.bench.roofline_layers import layers_of_config, layers_of_model
from quaver.bench.roofline_map import draw_map
from quaver.bench.shapes import MODELS
from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import bad_input
from quaver.roofline.device_specs import DEVICE_SPECS
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.float8 import RECIPES
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Settings, setting

_Device = Annotated[str, OneOf(tuple(spec.name for spec in DEVICE_SPECS), has_aliases=True)]


@dataclass(frozen=True)
class RooflineOptions(Settings):
    """Predict the speedup of a float8 linear over bfloat16, forward and backward, from data sheets. Needs no GPU."""

    device: tuple[_Device, ...] = setting(("H200",), "GPUs to predict for.")
    recipes: tuple[Annotated[str, OneOf(RECIPES, has_aliases=True)], ...] = setting(
        ("tensorwise", "rowwise", "delayed"), "Recipes to predict."
    )
    tokens: AtLeast1 = setting(16384, "M of the models' layers: tokens on one GPU.")
    model: tuple[Annotated[str, OneOf(tuple(MODELS), has_aliases=True)], ...] = setting(
        (), "Models; all by default, or none with --config."
    )
    config: tuple[str, ...] = setting((), "TOML files of quaver train; their models are predicted.")
    microbatches: NotNegative = setting(
        0, "Micro-batches that share the casts of a weight (cast_weights_once); 0: forward and backward cast it each."
    )
    pictures: tuple[_Device, ...] | None = setting(
        None, "Devices to draw; all of --device by default, no word for none."
    )
    output: str = setting("benchmarks/results/roofline", "Folder of the CSV, the JSON and the pictures.")

    def settings(self) -> RooflineSettings:
        """Resolve the names. Raises ValueError for an unknown name, or two models of one name."""
        models = [layers_of_model(name) for name in self.model or ([] if self.config else MODELS)]
        models += [layers_of_config(Path(path)) for path in self.config]
        names = [model.name for model in models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"two models are called {twice}; expected each --model once, and --config files of other names"
            )
        devices, recipes = specs_of(self.device), recipes_of(self.recipes)
        return RooflineSettings(devices, recipes, self.tokens, tuple(models), self.microbatches or None)


def run(argv: list[str]) -> int:
    """Predict as `argv` says, print the tables, save CSV, JSON and pictures; 0 when done, 2 for bad input."""
    with bad_input():
        options = parse_options(RooflineOptions, argv, prog="quaver bench roofline")
        settings, output = options.settings(), Path(options.output)
        pictured = settings.devices if options.pictures is None else specs_of(options.pictures)
        missing = [spec.name for spec in pictured if spec not in settings.devices]
        if missing:
            raise ValueError(f"--pictures {', '.join(missing)}: expected devices that are in --device")
        output.mkdir(parents=True, exist_ok=True)
        roofline = predict(settings)
        files = roofline.write(output)
    for spec in pictured:
        files.append(output / f"roofline_{spec.name.lower()}.png")
        draw_map(roofline, spec, files[-1])
    _print(roofline)
    print(f"saved {', '.join(map(str, files))}")
    return 0


def _print(roofline: Roofline) -> None:
    console, settings = wide_console(120), roofline.settings
    shapes = {(row.model, row.layer): f"{row.k:,} -> {row.n:,}" for row in roofline.layers}
    found = {(row.device, row.model, row.layer, row.recipe): row for row in roofline.layers}
    for device in (spec.name for spec in settings.devices):
        rows = []
        for layer, shape in shapes.items():
            cells = (f"{found[device, *layer, recipe].cost.speedup:.2f}" for recipe in settings.recipes)
            rows.append((*layer, shape, *cells))
        title = f"{device}: predicted speedup at {settings.tokens:,} tokens"
        console.print(make_table(title, ("model", "layers", "K -> N", *settings.recipes), rows=rows))
    rows = []
    for total in roofline.totals:
        speedups = (f"{each:.2f}" for each in (total.speedup, *map(total.step_speedup, LINEAR_SHARES)))
        rows.append((total.model, total.device, total.recipe, f"{1e3 * total.bfloat16_s:,.0f} ms", *speedups))
    title = "All linears of a model; and a step in which they take this share of bfloat16's time, by Amdahl's law"
    columns = ("model", "device", "recipe", "bfloat16", "linears", *(f"{share:.0%}" for share in LINEAR_SHARES))
    console.print(make_table(title, columns, rows=rows))
    console.print("Predictions from data sheets, and no measurements: docs/performance.md says what they leave out.")
