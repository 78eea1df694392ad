"""What `quaver bench linear` measured, beside what the roofline predicts for the same linears."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quaver.devices import DEVICE_SPECS, DeviceSpec, find_device_spec
from quaver.filters import linear_cost

MODES = ("compiled", "eager")
"""Of two measurements of one linear a row shows the first; the comparison has all."""


@dataclass(frozen=True)
class Measurement:
    """The speedup over bfloat16 that one linear had, both in the same mode."""

    device: str
    m: int
    k: int
    n: int
    recipe: str
    mode: str
    speedup: float


@dataclass(frozen=True)
class Comparison:
    """A measurement and the prediction for it, without a scope around microbatches and with an input of its own."""

    measurement: Measurement
    predicted: float

    @property
    def error_percent(self) -> float:
        """How far the prediction is above the measurement."""
        return 100 * (self.predicted / self.measurement.speedup - 1)


def read_measurements(path: Path, specs: Iterable[DeviceSpec]) -> list[Measurement]:
    """The measurements of quaver's linears in a JSON file that `quaver bench linear` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is another kind of file, or was measured on a device that is none of `specs`, or not in bfloat16.
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
        known = ", ".join(each.name for each in DEVICE_SPECS)
        raise ValueError(
            f"--measured {path}: measured on {device}, which has no prediction; there are ones for {known}"
        )
    if spec not in specs:
        raise ValueError(f"--measured {path}: measured on {spec.name}, which is not predicted; add it to --device")
    if dtype != "torch.bfloat16":
        raise ValueError(f"--measured {path}: expected operands of bfloat16, got {dtype}; run with --dtype bfloat16")
    return [Measurement(spec.name, *shape, recipe, mode, speedup) for shape, recipe, mode, speedup in found]


def _measurement(row: dict[str, Any]) -> tuple[tuple[int, int, int], str, str, float]:
    m, k, n = (int(number) for number in row["shape"].partition(" (")[0].split(" x "))
    return (m, k, n), str(row["recipe"]), str(row["mode"]), 1 / float(row["time_over_bfloat16"])


def compare(measurements: Iterable[Measurement]) -> list[Comparison]:
    """Each measurement beside its prediction."""
    comparisons = []
    for each in measurements:
        spec = find_device_spec(each.device)
        if spec is None:
            raise ValueError(f"no data about device {each.device!r}")
        cost = linear_cost(each.m, each.k, each.n, each.recipe, spec)
        comparisons.append(Comparison(each, cost.speedup))
    return comparisons


def best_known(measurements: Iterable[Measurement]) -> dict[tuple[str, int, int, int, str], Measurement]:
    """By device, M, K, N and recipe, the measurement in the first of MODES that there is."""
    known: dict[tuple[str, int, int, int, str], Measurement] = {}
    for each in sorted(measurements, key=lambda each: MODES.index(each.mode) if each.mode in MODES else len(MODES)):
        known.setdefault((each.device, each.m, each.k, each.n, each.recipe), each)
    return known
