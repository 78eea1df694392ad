"""`quaver bench roofline [options]`: predicts the speedup of float8 linears on GPUs that this machine lacks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from rich.table import Table

from quaver.lab.bench.roofline import (
    LINEAR_SHARES,
    Roofline,
    RooflineSettings,
    canonicalize_recipes,
    predict_roofline,
    require_device_specs,
)
from quaver.lab.bench.roofline_layers import list_config_layers, list_model_layers
from quaver.lab.bench.roofline_map import draw_map
from quaver.lab.bench.shapes import LLAMA3_MODELS
from quaver.lab.cli.errors import report_bad_input
from quaver.lab.output_file import check_output_folder, replace_output
from quaver.lab.settings.fields import AtLeast1, NotNegative, OneOf, Settings, UserPath, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.settings.float8 import RecipeName
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.roofline.device_specs import DEVICE_SPECS
from quaver.runtime.errors import InputError

_Device = Annotated[str, OneOf(tuple(spec.name.lower() for spec in DEVICE_SPECS), has_aliases=True)]


@dataclass(frozen=True)
class RooflineOptions(Settings):
    """Predict the speedup of a float8 linear over bfloat16, forward and backward, from data sheets. Needs no GPU."""

    device: tuple[_Device, ...] = setting(("h200",), "GPUs to predict for.")
    recipes: tuple[RecipeName, ...] = setting(("tensorwise", "rowwise", "delayed"), "Recipes to predict.")
    tokens: AtLeast1 = setting(16384, "M of the models' layers: tokens on one GPU.")
    model: tuple[Annotated[str, OneOf(tuple(LLAMA3_MODELS), has_aliases=True)], ...] = setting(
        (), "Models; all by default, or none with --config."
    )
    config: tuple[UserPath, ...] = setting((), "TOML files of quaver train; their models are predicted.")
    microbatches: NotNegative = setting(
        0, "Microbatches that share the casts of a weight (cast_weights_once); 0: forward and backward cast it each."
    )
    pictures: tuple[_Device, ...] | None = setting(
        None, "Devices to draw; all of --device by default, no word for none."
    )
    output: UserPath = setting("runs/bench-roofline", "Folder of the CSV, the JSON and the pictures.")

    def resolve(self) -> RooflineSettings:
        """Resolve the names. Raises InputError for an unknown name, or two models of one name."""
        models = [list_model_layers(name) for name in self.model or ([] if self.config else LLAMA3_MODELS)]
        models += [list_config_layers(Path(path)) for path in self.config]
        names = [model.name for model in models]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise InputError(
                f"two models are called {repeated}; give each --model once, and --config files other names"
            )
        devices, recipes = require_device_specs(self.device), canonicalize_recipes(self.recipes)
        return RooflineSettings(devices, recipes, self.tokens, tuple(models), self.microbatches or None)


def main(argv: list[str]) -> int:
    """Predict, print the tables, save CSV, JSON and pictures; returns 0 when done, 2 for bad input."""
    with report_bad_input():
        options = parse_options(RooflineOptions, argv, prog="quaver bench roofline")
        settings, output = options.resolve(), Path(options.output)
        drawn_specs = settings.devices if options.pictures is None else require_device_specs(options.pictures)
        missing = [spec.name for spec in drawn_specs if spec not in settings.devices]
        if missing:
            raise InputError(f"--pictures must be devices of --device, got {', '.join(missing)}")
        check_output_folder(output, "--output")
        with show_progress("predicting"):
            roofline = predict_roofline(settings)
    files = roofline.write(output)
    for spec in drawn_specs:
        files.append(output / f"roofline_{spec.name.lower()}.png")
        with show_progress(f"drawing {files[-1]}"), replace_output(files[-1]) as image:
            draw_map(roofline, spec, image)
    print_views(iter_views(roofline))
    print(f"saved {', '.join(map(str, files))}")
    return 0


def iter_views(roofline: Roofline) -> Iterator[str | Table]:
    """Yield two tables per device and model: one of its linears, one of their totals."""
    settings = roofline.settings
    for spec, model in product(settings.devices, settings.models):
        key = (spec.name, model.name)
        layers = [layer for layer in roofline.layers if (layer.device, layer.model) == key]
        names = dict.fromkeys(f"{layer.layer}\n{layer.k:,}\n{layer.n:,}" for layer in layers)
        by_recipe: dict[str, list[str]] = {}
        for layer in layers:
            by_recipe.setdefault(layer.recipe, []).append(f"{layer.cost.speedup:.2f}")
        title = f"{model.name} on {spec.name}, {settings.tokens:,} tokens: speedup of a linear"
        rows = ((recipe, *cells) for recipe, cells in by_recipe.items())
        yield make_table(title, ("linear\nK\nN", *names), rows=rows, right=names)
        totals = [total for total in roofline.totals if (total.device, total.model) == key]
        speedups = [(total.speedup, *map(total.compute_step_speedup, LINEAR_SHARES)) for total in totals]
        columns = ("recipe", "linears", *(f"{share:.0%}" for share in LINEAR_SHARES))
        title = f"{model.name} on {spec.name}: speedup of all linears, {1e3 * totals[0].bfloat16_s:,.0f} ms in bfloat16"
        rows = ((total.recipe, *map("{:.2f}".format, row)) for total, row in zip(totals, speedups, strict=True))
        yield make_table(title, columns, rows=rows, right=columns[1:])
    yield "60% to 90%: of a step in which the linears take this share of bfloat16's time, by Amdahl's law."
    yield "Predictions from data sheets, and no measurements: docs/performance.md says what they leave out."
