"""The roofline of float8 linears (quaver/filters.py) for whole models, devices and recipes, beside measurements.

    result = predict(settings, read_measurements(path, settings.devices))
    write_csv(result, folder / "roofline.csv")      a row for each layer
    to_json(result)                                 settings, constants, whole models, comparisons

A model's linears take the sum of their times; `Total.step_speedup` is Amdahl's law for the share of a bfloat16 step
that they take, which a profile measures (docs/profiling.md) and a roofline cannot.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quaver.bench.roofline_layers import Layer, ModelLayers
from quaver.config import Float8LinearRecipeName
from quaver.devices import DEVICE_SPECS, DeviceSpec, find_device_spec
from quaver.filters import KERNEL_LAUNCH_S, MATMUL_SHARES, MEMORY_SHARE, LinearCost, LinearTime, linear_cost

LINEAR_SHARES = (0.6, 0.7, 0.8, 0.9)
"""Shares of a step's time for which Amdahl's law is written out."""

_DEVICE_NAMES = ", ".join(each.name for each in DEVICE_SPECS)
_PARTS = tuple(part.name.removesuffix("_s") for part in fields(LinearTime))
_BFLOAT16_PARTS = ("output", "grad_input", "grad_weight", "launches")
"""The others are zero."""


@dataclass(frozen=True)
class Settings:
    """What to predict. `tokens` is the M of the models' layers; `microbatches` is that of `linear_cost`."""

    devices: tuple[DeviceSpec, ...]
    recipes: tuple[str, ...]
    tokens: int
    models: tuple[ModelLayers, ...]
    microbatches: int | None = None


@dataclass(frozen=True)
class Measurement:
    """The speedup over bfloat16 in the same mode that one linear had in `quaver bench linear`."""

    device: str
    m: int
    k: int
    n: int
    recipe: str
    mode: str
    speedup: float


@dataclass(frozen=True)
class Comparison:
    """A measurement and its prediction: weights cast at each use, an input that no other linear reads."""

    measurement: Measurement
    predicted: float

    @property
    def error_percent(self) -> float:
        """How far the prediction is above the measurement."""
        return 100 * (self.predicted / self.measurement.speedup - 1)


@dataclass(frozen=True)
class Prediction:
    """One kind of layer on one device with one recipe."""

    device: str
    recipe: str
    m: int
    k: int
    n: int
    cost: LinearCost
    model: str
    layer: str
    measured: Measurement | None


@dataclass(frozen=True)
class Total:
    """All linears of a model, forward and backward; those that stay out of float8 take bfloat16's time in both.

    `alone_s` casts the input of every linear; in `shared_s` linears that read one input share its casts.
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
        """Of a step whose bfloat16 time is `linear_share` linears; the rest does not change."""
        return 1 / (1 - linear_share + linear_share / self.speedup)


@dataclass(frozen=True)
class Roofline:
    """All predictions, and the comparisons with measurements."""

    settings: Settings
    layers: tuple[Prediction, ...]
    totals: tuple[Total, ...]
    comparisons: tuple[Comparison, ...]


def specs_of(names: Sequence[str]) -> tuple[DeviceSpec, ...]:
    """The devices of these names, without repetition. Raises ValueError for an unknown one, listing the choices."""
    specs = {}
    for name in names:
        spec = find_device_spec(name)
        if spec is None:
            raise ValueError(f"no data about device {name!r}: name one of {_DEVICE_NAMES}")
        specs[spec.name] = spec
    return tuple(specs.values())


def recipes_of(names: Sequence[str]) -> tuple[str, ...]:
    """The recipes of these names, aliases resolved, without repetition. Raises ValueError for an unknown one."""
    return tuple(dict.fromkeys(Float8LinearRecipeName(name).value for name in names))


def predict(settings: Settings, measurements: Sequence[Measurement] = ()) -> Roofline:
    """Predict the models' layers and their sums.

    A layer gets its measured speedup only if that was measured under the predicted condition: weights cast at each use
    (`microbatches` is None). A compiled measurement is preferred to an eager one.
    """
    known: dict[tuple[str, int, int, int, str], Measurement] = {}
    if settings.microbatches is None:
        for each in sorted(measurements, key=lambda each: each.mode != "compiled"):
            known.setdefault((each.device, each.m, each.k, each.n, each.recipe), each)
    layers: list[Prediction] = []
    totals = []
    for spec in settings.devices:
        for recipe in settings.recipes:
            for model in settings.models:
                layers += _layers(model, recipe, spec, settings, known)
                totals.append(_total(model, recipe, spec, settings))
    return Roofline(settings, tuple(layers), tuple(totals), tuple(compare(measurements)))


def _layers(
    model: ModelLayers,
    recipe: str,
    spec: DeviceSpec,
    settings: Settings,
    known: dict[tuple[str, int, int, int, str], Measurement],
) -> Iterator[Prediction]:
    """Each kind of float8 layer, with an input of its own: as it would be measured alone."""
    m = settings.tokens
    for name, (k, n) in merged_names(model).items():
        cost = linear_cost(m, k, n, recipe, spec, microbatches=settings.microbatches)
        measured = known.get((spec.name, m, k, n, recipe))
        yield Prediction(spec.name, recipe, m, k, n, cost, model.name, name, measured)


def merged_names(model: ModelLayers) -> dict[str, tuple[int, int]]:
    """K and N of the float8 layers; layers of one shape are one entry: {"q,o": (4096, 4096), ...}."""
    names: dict[tuple[int, int], list[str]] = {}
    for layer in model.layers:
        if layer.in_float8:
            short = layer.name.removesuffix("_proj")
            of_shape = names.setdefault((layer.k, layer.n), [])
            of_shape += [short] if short not in of_shape else []
    return {",".join(of_shape): shape for shape, of_shape in names.items()}


def _total(model: ModelLayers, recipe: str, spec: DeviceSpec, settings: Settings) -> Total:
    def cost(layer: Layer, readers: int) -> LinearCost:
        options = {"microbatches": settings.microbatches, "input_readers": readers}
        return linear_cost(settings.tokens, layer.k, layer.n, recipe, spec, **options)  # type: ignore[arg-type]

    bfloat16 = alone = shared = 0.0
    for layer in model.layers:
        each = cost(layer, 1)
        plain_s = layer.count * each.bfloat16.total_s
        bfloat16 += plain_s
        alone += layer.count * each.float8.total_s if layer.in_float8 else plain_s
        shared += layer.count * cost(layer, layer.input_readers).float8.total_s if layer.in_float8 else plain_s
    return Total(model.name, spec.name, recipe, bfloat16, alone, shared)


def read_measurements(path: Path, specs: Iterable[DeviceSpec]) -> list[Measurement]:
    """The measurements of quaver's linears in a JSON file that `quaver bench linear` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is another kind of file, or its device is not one of `specs`, or its operands are not bfloat16.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("benchmark", "linear") != "linear":
            raise ValueError(f"this is one of {result['benchmark']}")
        device, dtype = str(result["environment"]["device"]), str(result["dtype"])
        found = [_measurement(row) for row in result["rows"] if row["library"] == "quaver"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"--measured {path}: expected the JSON of quaver bench linear ({error!r})") from error
    spec = find_device_spec(device)
    if spec is None:
        raise ValueError(f"--measured {path}: measured on {device}, which has no prediction; known: {_DEVICE_NAMES}")
    if spec not in specs:
        raise ValueError(f"--measured {path}: measured on {spec.name}, which is not predicted; add it to --device")
    if dtype != "torch.bfloat16":
        raise ValueError(f"--measured {path}: expected operands of bfloat16, got {dtype}; run with --dtype bfloat16")
    return [Measurement(spec.name, *shape, recipe, mode, speedup) for shape, recipe, mode, speedup in found]


def _measurement(row: dict[str, Any]) -> tuple[tuple[int, int, int], str, str, float]:
    m, k, n = (int(number) for number in row["shape"].partition(" (")[0].split(" x "))
    return (m, k, n), str(row["recipe"]), str(row["mode"]), 1 / float(row["time_over_bfloat16"])


def compare(measurements: Iterable[Measurement]) -> list[Comparison]:
    """Each measurement with its prediction."""
    comparisons = []
    for each in measurements:
        (spec,) = specs_of([each.device])
        cost = linear_cost(each.m, each.k, each.n, each.recipe, spec)
        comparisons.append(Comparison(each, cost.speedup))
    return comparisons


def _csv_row(prediction: Prediction) -> dict[str, Any]:
    """Times in microseconds; the parts of each precision follow the sums."""
    cost, measured = prediction.cost, prediction.measured
    row: dict[str, Any] = {name: getattr(prediction, name) for name in ("m", "k", "n", "device", "recipe")}
    row |= {"bf16_us": _us(cost.bfloat16.total_s), "fp8_us": _us(cost.float8.total_s), "speedup": f"{cost.speedup:.4f}"}
    row |= {f"bf16_{part}_us": _us(getattr(cost.bfloat16, f"{part}_s")) for part in _BFLOAT16_PARTS}
    row |= {f"fp8_{part}_us": _us(getattr(cost.float8, f"{part}_s")) for part in _PARTS}
    row |= {"model": prediction.model, "layer": prediction.layer, "measured_speedup": "", "measured_mode": ""}
    row["error_percent"] = ""
    if measured is not None:
        row |= {"measured_speedup": f"{measured.speedup:.4f}", "measured_mode": measured.mode}
        row["error_percent"] = f"{100 * (cost.speedup / measured.speedup - 1):.1f}"
    return row


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.2f}"


def write_csv(roofline: Roofline, path: Path) -> None:
    """Write the prediction of every layer."""
    rows = [_csv_row(prediction) for prediction in roofline.layers]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def to_json(roofline: Roofline) -> dict[str, Any]:
    """Settings, constants, whole models, and every comparison with a measurement."""
    return {
        "settings": asdict(roofline.settings),
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
