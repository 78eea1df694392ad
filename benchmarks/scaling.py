"""Measures how dynamic, delayed and static scales fit tensors that grow, jump and drift; draws docs/scaling.md's plots.

    python -m benchmarks.scaling                 measure again, in seconds, and draw
    python -m benchmarks.scaling --recorded      draw from benchmarks/results/scaling.json

Each contestant is a linear on a CPU. Its inputs are Gaussian, with a standard deviation that follows the scenario; all
contestants get the same inputs. SQNR is 20 log10(norm(exact) / norm(exact - result)), in dB. Inputs are seeded and
nothing is timed, so the figures do not depend on the machine.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from benchmarks.record import ROOT, describe_provenance, write_results
from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    ScalingType,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.scaling import cast_to_float8, cast_with_persistent_scale, compute_amax

RECORD = ROOT / "benchmarks" / "results" / "scaling.json"
DOCS = ROOT / "docs" / "scaling.md"
IMAGES = ROOT / "docs" / "images"

TOKENS, DIM = 512, 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEPS, EVENT_STEP, GROWING_STEPS = 40, 10, 10
DRIFT_STEPS, DRIFT_UP, DRIFT_DOWN = 60, 1.08, 0.75
POWERS = [step / 2 for step in range(-60, 17)]
OUTLIERS = 1000  # one element in 1000 is 64 times as large

_STATIC = CastConfig(scaling_type=ScalingType.STATIC)
STATIC = Float8LinearConfig(cast_config_input=_STATIC, cast_config_weight=_STATIC, cast_config_grad_output=_STATIC)


@dataclass(frozen=True)
class Scenario:
    """The standard deviation of the input at each step, and the configs of the contestants by name."""

    deviations: list[float]
    contestants: dict[str, Float8LinearConfig]


def make_delayed_config(**options: Any) -> Float8LinearConfig:
    """Return the recipe delayed with other options of its rule."""
    rule = DelayedScalingConfig(**options)
    return replace(Float8LinearConfig.from_recipe_name("delayed"), delayed_scaling_config=rule)


def make_scenarios() -> dict[str, Scenario]:
    """Return the scenarios by name."""
    both = {"dynamic": Float8LinearConfig(), "delayed, max": make_delayed_config()}
    most_recent = {"delayed, most_recent": make_delayed_config(scale_fn_name="most_recent")}
    headroom = {"delayed, headroom 2": make_delayed_config(headroom=2.0)}
    growth = [2.0 ** min(max(step - EVENT_STEP + 1, 0), GROWING_STEPS) for step in range(STEPS)]
    spikes = [[size if step == EVENT_STEP else 1.0 for step in range(STEPS)] for size in (1e3, 1e6)]
    drifts = [[factor**step for step in range(DRIFT_STEPS)] for factor in (DRIFT_UP, DRIFT_DOWN)]
    return {
        "growth": Scenario(growth, {**both, **headroom, "static": STATIC}),
        "spike_1e3": Scenario(spikes[0], {**both, **most_recent}),
        "spike_1e6": Scenario(spikes[1], {**both, **most_recent}),
        "drift_up": Scenario(drifts[0], {**both, "static": STATIC}),
        "drift_down": Scenario(drifts[1], {**both, "static": STATIC}),
    }


def make_gaussian(seed: int, *shape: int) -> Tensor:
    """Return normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compute_sqnr(exact: Tensor, result: Tensor) -> float:
    """Return the SQNR of `result` in dB."""
    exact, result = exact.double(), result.double()
    return 20 * math.log10(float(exact.norm() / (exact - result).norm()))


def _make_linear(config: Float8LinearConfig) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(make_gaussian(1, DIM, DIM))
    convert_to_float8_training(model, config=config)
    if config is STATIC:
        with calibrate_float8_static_scales(model):
            for seed in range(100, 104):
                model(make_gaussian(seed, TOKENS, DIM)).backward(make_gaussian(seed + 100, TOKENS, DIM))
    return model


def measure_casts(deviations: list[float], config: Float8LinearConfig) -> dict[str, list[float]]:
    """Return three figures of the input's cast at each step: SQNR, the saturated share, and `used_over_ideal`."""
    model = _make_linear(config)
    state = float8_scaling_state(model)
    series: dict[str, list[float]] = {"sqnr_db": [], "saturated": [], "used_over_ideal": []}
    for step, deviation in enumerate(deviations):
        x = deviation * make_gaussian(1000 + step, TOKENS, DIM)
        scale = state.state_dict().get("0.input.quant_scale", torch.tensor(0.0)).clone()
        codes, quant, _, seen = cast_with_persistent_scale(x, scale, E4M3)
        model(x)
        sync_float8_amax_and_scale_history(model)
        report = next((tensor for tensor in state.report() if tensor.name == "0.input"), None)
        assert report is None or report.saturated == int(seen[1])  # the linear's own cast is this one
        series["sqnr_db"].append(compute_sqnr(x, codes.double() / quant.double()))
        series["saturated"].append(float(seen[1]) / x.numel())
        series["used_over_ideal"].append(1.0 if report is None else report.used_over_ideal)
    return {name: [_round(value) for value in values] for name, values in series.items()}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def measure_wrong_scales() -> dict[str, dict[str, list[float]]]:
    """Return the SQNR of casts with 2**power times the ideal scale, and the shares that saturate and become zero."""
    plain = make_gaussian(0, 1024, 1024)
    with_outliers = plain.clone()
    with_outliers.view(-1)[::OUTLIERS] *= 64
    tensors = {
        "e4m3, Gaussian": (plain, E4M3),
        "e5m2, Gaussian": (plain, E5M2),
        "e4m3, Gaussian with outliers": (with_outliers, E4M3),
    }
    results = {}
    for name, (hp, dtype) in tensors.items():
        series: dict[str, list[float]] = {"power": POWERS, "sqnr_db": [], "saturated": [], "zero": []}
        for power in POWERS:
            quant = (FLOAT8_FORMATS[dtype].max / compute_amax(hp).double() * 2.0**power).float()
            codes = cast_to_float8(hp, quant, dtype).float()
            saturated = ((hp * quant).abs() > FLOAT8_FORMATS[dtype].saturates_above).float().mean()
            zero = ((codes == 0) & (hp != 0)).float().mean()
            restored = codes.double() / quant.double()
            for key, value in (("sqnr_db", compute_sqnr(hp, restored)), ("saturated", saturated), ("zero", zero)):
                series[key].append(_round(float(value)))
        results[name] = series
    return results


def measure() -> dict[str, Any]:
    """Measure all series, by scenario and contestant, on one thread."""
    torch.set_num_threads(1)
    series = {
        name: {
            contestant: measure_casts(scenario.deviations, config)
            for contestant, config in scenario.contestants.items()
        }
        for name, scenario in make_scenarios().items()
    }
    shape = {"tokens": TOKENS, "dim": DIM}
    return {
        "environment": describe_provenance("scaling"),
        "linear": shape,
        "scenarios": series,
        "wrong_scales": measure_wrong_scales(),
    }


_STYLE: dict[str, dict[str, Any]] = {
    "dynamic": {"color": "0.55", "linewidth": 4, "zorder": 1},
    "delayed, max": {"color": "tab:blue"},
    "delayed, most_recent": {"color": "tab:green", "linestyle": (0, (5, 2))},
    "delayed, headroom 2": {"color": "tab:purple", "linestyle": (0, (4, 1, 1, 1))},
    "static": {"color": "tab:red", "linestyle": (0, (1, 1))},
    "e4m3, Gaussian": {"color": "tab:blue"},
    "e5m2, Gaussian": {"color": "tab:green", "linestyle": (0, (5, 2))},
    "e4m3, Gaussian with outliers": {"color": "tab:orange", "linestyle": (0, (1, 1))},
}
_LABELS = {"sqnr_db": "SQNR of the cast, dB", "saturated": "saturated elements, %"}
_LABELS["used_over_ideal"] = "used_over_ideal"


def _draw_columns(results: dict[str, Any], columns: dict[str, str], title: str) -> Figure:
    """Draw a column for each scenario, and a row for each measure."""
    figure, axes = plt.subplots(
        len(_LABELS), len(columns), figsize=(11, 8.2), layout="constrained", sharex="col", sharey="row", squeeze=False
    )
    for column, (scenario, heading) in enumerate(columns.items()):
        for row, (measured, label) in enumerate(_LABELS.items()):
            axis: Axes = axes[row, column]
            for contestant, series in results["scenarios"][scenario].items():
                values = [100 * value for value in series[measured]] if measured == "saturated" else series[measured]
                axis.plot(values, label=contestant, drawstyle="steps-mid", **_STYLE[contestant])
            if measured == "used_over_ideal":
                axis.set_yscale("log", base=2)
                axis.yaxis.set_major_locator(LogLocator(base=2**8, numticks=12))
                axis.axhline(1, color="0.3", linewidth=0.8)
                axis.set_xlabel("step")
            else:
                axis.set_ylim((-4, 104) if measured == "saturated" else (-1.5, 35))
            if column == 0:
                axis.set_ylabel(label)
        axes[0, column].set_title(heading)
    _draw_legend(figure, axes[0, 0], title, ncols=5)
    return figure


def _draw_legend(figure: Figure, axis: Axes, title: str, ncols: int) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=ncols)
    figure.suptitle(title)


def _draw_moving(results: dict[str, Any]) -> Figure:
    columns = {"growth": "doubles at each of ten steps", "drift_up": "8 % larger each step"}
    columns["drift_down"] = "25 % smaller each step"
    return _draw_columns(results, columns, "An input that grows or drifts; static scales were calibrated before step 0")


def _draw_spike(results: dict[str, Any]) -> Figure:
    columns = {"spike_1e3": "1,000 times as large", "spike_1e6": "1,000,000 times as large"}
    return _draw_columns(results, columns, "One step (10) with a larger input, history_len=16")


def _draw_wrong_scale(results: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    measures = {"sqnr_db": "SQNR of the cast, dB", "saturated": "saturated elements, %", "zero": "became zero, %"}
    for axis, (measured, label) in zip(axes, measures.items(), strict=True):
        for name, series in results["wrong_scales"].items():
            values = [100 * value for value in series[measured]] if measured != "sqnr_db" else series[measured]
            axis.plot(series["power"], values, label=name, **_STYLE[name])
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set(xlabel="log2(used_over_ideal)", title=label, xticks=range(-28, 9, 4), xlim=(-30, 8))
    title = "A scale too large saturates at once; one too small costs little until values become zero"
    _draw_legend(figure, axes[0], title, ncols=3)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "scaling_wrong_scale.png": _draw_wrong_scale,
    "scaling_moving.png": _draw_moving,
    "scaling_spike.png": _draw_spike,
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write every picture to `folder`: the same bytes for the same results and versions."""
    style = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "lines.linewidth": 1.8, "legend.frameon": False}
    with matplotlib.rc_context(style):
        for name, make in PICTURES.items():
            figure = make(results)
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})
            plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help=f"read {RECORD.relative_to(ROOT)}; measure nothing")
    if parser.parse_args().recorded:
        results = json.loads(RECORD.read_text())
    else:
        results = measure()
        write_results(RECORD, results)
    draw(results, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
