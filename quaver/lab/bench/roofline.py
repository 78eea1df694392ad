"""The roofline of float8 linears (quaver/roofline/cost.py) for whole models, devices and recipes.

    predict_roofline(settings).write(folder)    # roofline.csv: a row per layer; roofline.json: settings and sums

A model's linears take the sum of their times; `ModelTotal.compute_step_speedup` is Amdahl's law for the share of a
bfloat16 step that they take, which a profile measures and a roofline cannot.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

from quaver.kernels.native_mm import ScaleKind
from quaver.lab.bench.roofline_layers import ExpertGroup, LinearGroup, ModelLayers
from quaver.lab.output_file import replace_output, write_result
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.cost import KERNEL_LAUNCH_S, LinearCost, LinearTime, predict_linear_cost
from quaver.roofline.device_specs import DEVICE_SPECS, DeviceSpec, require_device_spec
from quaver.roofline.matmul import MATMUL_SHARES, MEMORY_SHARE
from quaver.roofline.scaled_matmul import get_scales_share

LINEAR_SHARES = (0.6, 0.7, 0.8, 0.9)
"""Shares of a step's time for which a speedup by Amdahl's law is given."""

_TIME_PARTS = tuple(part.name.removesuffix("_s") for part in fields(LinearTime))
_BFLOAT16_PARTS = ("output", "grad_input", "grad_weight", "launches")
"""The parts of a bfloat16 time that are not always zero."""


@dataclass(frozen=True)
class RooflineSettings:
    """The predictions to make. `tokens` is the M of the models' layers; `predict_linear_cost` takes `microbatches`."""

    devices: tuple[DeviceSpec, ...]
    recipes: tuple[str, ...]
    tokens: int
    models: tuple[ModelLayers, ...]
    microbatches: int | None = None


@dataclass(frozen=True)
class RooflinePrediction:
    """A model's layers of one shape on one device with one recipe. Each layer casts its input.

    `m` is the number of tokens. A layer of experts has the `m` of one expert and the `cost` of all experts of a rank.
    """

    model: str
    layer: str
    m: int
    k: int
    n: int
    device: str
    recipe: str
    cost: LinearCost


@dataclass(frozen=True)
class ModelTotal:
    """All linears of a model, forward and backward. Linears in high precision take bfloat16's time in both sums.

    In `alone_s` every linear casts its input; in `shared_s` linears that read one input share its casts.
    """

    model: str
    device: str
    recipe: str
    bfloat16_s: float
    alone_s: float
    shared_s: float

    @property
    def speedup(self) -> float:
        """The speedup of the linears with shared inputs."""
        return self.bfloat16_s / self.shared_s

    def compute_step_speedup(self, linear_share: float) -> float:
        """Return the speedup of a step in which linears take `linear_share` of bfloat16's time, by Amdahl's law."""
        return 1 / (1 - linear_share + linear_share / self.speedup)


@dataclass(frozen=True)
class Roofline:
    """All predictions."""

    settings: RooflineSettings
    layers: tuple[RooflinePrediction, ...]
    totals: tuple[ModelTotal, ...]

    def write(self, folder: Path) -> list[Path]:
        """Write roofline.csv and roofline.json into `folder`, and return them. Raises NotWrittenError."""
        table, summary = folder / "roofline.csv", folder / "roofline.json"
        rows = [_make_csv_row(layer) for layer in self.layers]
        with replace_output(table) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        write_result(self.to_json(), summary)
        return [table, summary]

    def to_json(self) -> dict[str, Any]:
        """Return settings, constants and totals for JSON."""
        constants = {
            "matmul_shares": {name: shares._asdict() for name, shares in MATMUL_SHARES.items()},
            "rowwise_shares": {spec.name: get_scales_share(ScaleKind.ROWWISE, spec) for spec in DEVICE_SPECS},
            "memory_share": MEMORY_SHARE,
            "kernel_launch_s": KERNEL_LAUNCH_S,
        }
        totals = []
        for total in self.totals:
            steps = {str(share): total.compute_step_speedup(share) for share in LINEAR_SHARES}
            totals.append({**asdict(total), "speedup": total.speedup, "step_speedup": steps})
        return {"settings": asdict(self.settings), "constants": constants, "totals": totals}


def require_device_specs(names: Sequence[str]) -> tuple[DeviceSpec, ...]:
    """Return the devices with these names, each once. Raises InputError for an unknown name, listing the choices."""
    return tuple(dict.fromkeys(require_device_spec(name, option="--device") for name in names))


def canonicalize_recipes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the recipes with these names or aliases, each once. Raises InputError for an unknown name."""
    return tuple(dict.fromkeys(canonicalize_recipe(name) for name in names))


def predict_roofline(settings: RooflineSettings) -> Roofline:
    """Predict the models' layers and their sums."""
    tokens, microbatches = settings.tokens, settings.microbatches
    layers: list[RooflinePrediction] = []
    totals = []
    for spec, recipe, model in product(settings.devices, settings.recipes, settings.models):
        for name, layer in merge_equal_layers(model).items():
            cost, m = _predict_layer_cost(layer, recipe, spec, tokens, microbatches), _count_rows(layer, tokens)
            layers.append(RooflinePrediction(model.name, name, m, layer.k, layer.n, spec.name, recipe, cost))
        totals.append(_sum_layers(model, recipe, spec, tokens, microbatches))
    return Roofline(settings, tuple(layers), tuple(totals))


def merge_equal_layers(model: ModelLayers) -> dict[str, LinearGroup]:
    """Return a float8 layer of each shape; layers of one shape are one entry: {"q,o": LinearGroup(...), ...}."""
    groups: dict[tuple[int, int, bool], tuple[LinearGroup, dict[str, None]]] = {}
    for layer in model.layers:
        if layer.in_float8:
            _, names = groups.setdefault((layer.k, layer.n, isinstance(layer, ExpertGroup)), (layer, {}))
            names[layer.name.removesuffix("_proj")] = None
    return {",".join(names): layer for layer, names in groups.values()}


def _count_rows(layer: LinearGroup, tokens: int) -> int:
    """Return the rows that each matrix multiplies. Tokens are spread evenly over experts."""
    return ceil(tokens * layer.top_k / layer.experts) if isinstance(layer, ExpertGroup) else tokens


def _predict_layer_cost(
    layer: LinearGroup, recipe: str, spec: DeviceSpec, tokens: int, microbatches: int | None, input_readers: int = 1
) -> LinearCost:
    """Return the cost of one layer. A stack of experts is as many linears, which kernels compute in one launch."""
    rows = _count_rows(layer, tokens)
    cost = predict_linear_cost(
        rows, layer.k, layer.n, recipe, spec, microbatches=microbatches, input_readers=input_readers
    )
    if not isinstance(layer, ExpertGroup):
        return cost
    return LinearCost(*(_scale_time(time, layer.experts) for time in (cost.bfloat16, cost.float8)))


def _scale_time(time: LinearTime, times: int) -> LinearTime:
    parts = {f"{part}_s": times * getattr(time, f"{part}_s") for part in _TIME_PARTS}
    return LinearTime(**parts | {"launches_s": time.launches_s})


def _sum_layers(model: ModelLayers, recipe: str, spec: DeviceSpec, tokens: int, microbatches: int | None) -> ModelTotal:
    bfloat16 = alone = shared = 0.0
    for layer in model.layers:
        by_itself, sharing = (
            _predict_layer_cost(layer, recipe, spec, tokens, microbatches, readers)
            for readers in (1, layer.input_readers)
        )
        plain_s = layer.count * by_itself.bfloat16.total_s
        bfloat16 += plain_s
        alone += layer.count * by_itself.float8.total_s if layer.in_float8 else plain_s
        shared += layer.count * sharing.float8.total_s if layer.in_float8 else plain_s
    return ModelTotal(model.name, spec.name, recipe, bfloat16, alone, shared)


def _make_csv_row(layer: RooflinePrediction) -> dict[str, Any]:
    """Return times in microseconds; the parts of each precision follow its sum."""
    cost = layer.cost
    row: dict[str, Any] = {name: getattr(layer, name) for name in ("m", "k", "n", "device", "recipe")}
    row |= {"bf16_us": _format_us(cost.bfloat16.total_s), "fp8_us": _format_us(cost.float8.total_s)}
    row["speedup"] = f"{cost.speedup:.4f}"
    row |= {f"bf16_{part}_us": _format_us(getattr(cost.bfloat16, f"{part}_s")) for part in _BFLOAT16_PARTS}
    row |= {f"fp8_{part}_us": _format_us(getattr(cost.float8, f"{part}_s")) for part in _TIME_PARTS}
    return row | {"model": layer.model, "layer": layer.layer}


def _format_us(seconds: float) -> str:
    return f"{1e6 * seconds:.2f}"
