"""The roofline of float8 linears (quaver/filters.py) over many shapes, devices and recipes, and for whole models.

    result = predict(settings)
    write_csv(result, folder / "roofline.csv")      a row for each point of the map and each layer
    to_json(result)                                 settings, constants, layers, whole models, comparisons

A whole model's linears take the sum of their times; `Total.step_speedup` is Amdahl's law for the share of a step that
they take in bfloat16, which a profile tells (docs/profiling.md) and no roofline.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quaver.bench.roofline_layers import Layer, ModelLayers
from quaver.bench.roofline_measured import Comparison, Measurement, best_known, compare
from quaver.config import Float8LinearRecipeName
from quaver.devices import DEVICE_SPECS, DeviceSpec, find_device_spec
from quaver.filters import KERNEL_LAUNCH_S, MATMUL_SHARES, MEMORY_SHARE, LinearCost, LinearTime, linear_cost

MAP_TOKENS = tuple(2**power for power in range(9, 18))
MAP_SIZES = tuple(2**power for power in range(9, 16))
"""K = N of the map."""
LINEAR_SHARES = (0.6, 0.7, 0.8, 0.9)
"""Shares of a step's time for which Amdahl's law is spelled out."""

_PARTS = tuple(part.name for part in fields(LinearTime))
_BFLOAT16_PARTS = ("output_s", "grad_input_s", "grad_weight_s", "launches_s")
"""The others are zero."""


@dataclass(frozen=True)
class Settings:
    """What to predict. `tokens` is the M of the models' layers; for `microbatches` see `linear_cost`."""

    devices: tuple[DeviceSpec, ...]
    recipes: tuple[str, ...]
    tokens: int
    models: tuple[ModelLayers, ...]
    microbatches: int | None = None


@dataclass(frozen=True)
class Prediction:
    """One linear on one device with one recipe; `model` and `layer` are empty for a point of the map."""

    device: str
    recipe: str
    m: int
    k: int
    n: int
    cost: LinearCost
    model: str = ""
    layer: str = ""
    measured: Measurement | None = None


@dataclass(frozen=True)
class Total:
    """All linears of a model, forward and backward; those that stay out of float8 take bfloat16's time in both.

    `shared_s` is what they take in float8 if linears that read one input share its casts, and `alone_s` if none does.
    """

    model: str
    device: str
    recipe: str
    bfloat16_s: float
    alone_s: float
    shared_s: float

    @property
    def speedup(self) -> float:
        """Of the linears alone, inputs shared."""
        return self.bfloat16_s / self.shared_s

    def step_speedup(self, linear_share: float) -> float:
        """Of a step, of whose time the linears take `linear_share` in bfloat16, and of which nothing else changes."""
        return 1 / (1 - linear_share + linear_share / self.speedup)


@dataclass(frozen=True)
class Roofline:
    """Everything predicted, and compared with what was measured."""

    settings: Settings
    points: tuple[Prediction, ...]
    layers: tuple[Prediction, ...]
    totals: tuple[Total, ...]
    comparisons: tuple[Comparison, ...]


def specs_of(names: Sequence[str]) -> tuple[DeviceSpec, ...]:
    """The devices of these names, each once. Raises ValueError for an unknown one, listing the choices."""
    specs = {}
    for name in names:
        spec = find_device_spec(name)
        if spec is None:
            raise ValueError(
                f"no data about device {name!r}: name one of {', '.join(each.name for each in DEVICE_SPECS)}"
            )
        specs[spec.name] = spec
    return tuple(specs.values())


def recipes_of(names: Sequence[str]) -> tuple[str, ...]:
    """The recipes of these names, aliases resolved, each once. Raises ValueError for an unknown one."""
    return tuple(dict.fromkeys(Float8LinearRecipeName(name).value for name in names))


def predict(settings: Settings, measurements: Sequence[Measurement] = ()) -> Roofline:
    """Predict the map, the models' layers and their sums.

    A layer has its measured speedup beside it only where it was measured under what is predicted: weights cast at each
    use, so without `microbatches`.
    """
    known = best_known(measurements) if settings.microbatches is None else {}
    points, layers, totals = [], [], []
    for spec in settings.devices:
        for recipe in settings.recipes:
            points += [_point(m, size, recipe, spec, settings) for size in MAP_SIZES for m in MAP_TOKENS]
            for model in settings.models:
                layers += list(_layers(model, recipe, spec, settings, known))
                totals.append(_total(model, recipe, spec, settings))
    return Roofline(settings, tuple(points), tuple(layers), tuple(totals), tuple(compare(measurements)))


def _point(m: int, size: int, recipe: str, spec: DeviceSpec, settings: Settings) -> Prediction:
    cost = linear_cost(m, size, size, recipe, spec, microbatches=settings.microbatches)
    return Prediction(spec.name, recipe, m, size, size, cost)


def _layers(
    model: ModelLayers,
    recipe: str,
    spec: DeviceSpec,
    settings: Settings,
    known: dict[tuple[str, int, int, int, str], Measurement],
) -> Iterator[Prediction]:
    """Each kind of layer that is in float8, with an input of its own: as it would be measured alone."""
    m = settings.tokens
    for name, (k, n) in merged_names(model).items():
        cost = linear_cost(m, k, n, recipe, spec, microbatches=settings.microbatches)
        measured = known.get((spec.name, m, k, n, recipe))
        yield Prediction(spec.name, recipe, m, k, n, cost, model.name, name, measured)


def merged_names(model: ModelLayers) -> dict[str, tuple[int, int]]:
    """K and N of the layers in float8, by the names of those that have the same: {"q,o": (4096, 4096), ...}."""
    names: dict[tuple[int, int], list[str]] = {}
    for layer in model.layers:
        if layer.in_float8:
            short = layer.name.removesuffix("_proj")
            of_shape = names.setdefault((layer.k, layer.n), [])
            of_shape += [short] if short not in of_shape else []
    return {",".join(of_shape): shape for shape, of_shape in names.items()}


def _total(model: ModelLayers, recipe: str, spec: DeviceSpec, settings: Settings) -> Total:
    bfloat16 = alone = shared = 0.0
    for layer in model.layers:
        each = _layer_cost(layer, recipe, spec, settings, readers=1)
        bfloat16 += layer.count * each.bfloat16.total_s
        if layer.in_float8:
            sharing = _layer_cost(layer, recipe, spec, settings, readers=layer.input_readers)
            alone += layer.count * each.float8.total_s
            shared += layer.count * sharing.float8.total_s
        else:
            alone += layer.count * each.bfloat16.total_s
            shared += layer.count * each.bfloat16.total_s
    return Total(model.name, spec.name, recipe, bfloat16, alone, shared)


def _layer_cost(layer: Layer, recipe: str, spec: DeviceSpec, settings: Settings, *, readers: int) -> LinearCost:
    microbatches = settings.microbatches
    return linear_cost(
        settings.tokens, layer.k, layer.n, recipe, spec, microbatches=microbatches, input_readers=readers
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def csv_row(prediction: Prediction) -> dict[str, Any]:
    """One line of the CSV, by column: times in microseconds, the parts of each precision after the sums."""
    cost, measured = prediction.cost, prediction.measured
    row: dict[str, Any] = {name: getattr(prediction, name) for name in ("m", "k", "n", "device", "recipe")}
    row |= {"bf16_us": _us(cost.bfloat16.total_s), "fp8_us": _us(cost.float8.total_s), "speedup": f"{cost.speedup:.4f}"}
    row |= {f"bf16_{part.removesuffix('_s')}_us": _us(getattr(cost.bfloat16, part)) for part in _BFLOAT16_PARTS}
    row |= {f"fp8_{part.removesuffix('_s')}_us": _us(getattr(cost.float8, part)) for part in _PARTS}
    row |= {"model": prediction.model, "layer": prediction.layer, "measured_speedup": "", "measured_mode": ""}
    row["error_percent"] = ""
    if measured is not None:
        row |= {"measured_speedup": f"{measured.speedup:.4f}", "measured_mode": measured.mode}
        row["error_percent"] = f"{100 * (cost.speedup / measured.speedup - 1):.1f}"
    return row


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.2f}"


def write_csv(roofline: Roofline, path: Path) -> None:
    """Write every prediction: first the map, then the layers."""
    rows = [csv_row(prediction) for prediction in (*roofline.points, *roofline.layers)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def to_json(roofline: Roofline) -> dict[str, Any]:
    """What the CSV does not say: settings, constants, whole models, and every comparison with a measurement."""
    settings = roofline.settings
    return {
        "settings": asdict(settings),
        "constants": {
            "matmul_shares": {name: shares._asdict() for name, shares in MATMUL_SHARES.items()},
            "memory_share": MEMORY_SHARE,
            "kernel_launch_s": KERNEL_LAUNCH_S,
        },
        "totals": [
            {
                **asdict(total),
                "speedup": total.speedup,
                "step_speedup": {str(share): total.step_speedup(share) for share in LINEAR_SHARES},
            }
            for total in roofline.totals
        ],
        "comparisons": [
            {**asdict(each.measurement), "predicted": each.predicted, "error_percent": each.error_percent}
            for each in roofline.comparisons
        ],
    }
