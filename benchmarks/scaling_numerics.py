"""How dynamic, delayed and static scales fit tensors that stay, grow, jump and drift; `python -m benchmarks.scaling`.

Each contestant is a real linear. Its inputs are Gaussian, with a standard deviation that follows the scenario; all
contestants are given the same ones. SQNR is 20 log10(norm(exact) / norm(exact - result)), in dB.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.scaling_costs import config_of
from quaver import (
    DelayedScalingConfig,
    Float8LinearConfig,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.formats import FORMATS
from quaver.scaling import amax, cast_to_float8, cast_with_persistent_scale

TOKENS, DIM = 512, 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

STEPS, EVENT, GROWING_STEPS = 40, 10, 10
DRIFT_STEPS, DRIFT_UP, DRIFT_DOWN = 60, 1.08, 0.75


@dataclass(frozen=True)
class Scenario:
    """The standard deviation of the input at each step, and the contestants: a name, and a config."""

    deviations: list[float]
    contestants: dict[str, Float8LinearConfig]


def delayed(**options: Any) -> Float8LinearConfig:
    """The delayed recipe with other options of its rule."""
    return replace(config_of("delayed"), delayed_scaling_config=DelayedScalingConfig(**options))


def scenarios() -> dict[str, Scenario]:
    """The scenarios by name."""
    dynamic, static = config_of("tensorwise"), config_of("static")
    growth = [2.0 ** min(max(step - EVENT + 1, 0), GROWING_STEPS) for step in range(STEPS)]
    windowed = {"delayed, window (0, 1.5)": delayed(dynamic_window=(0.0, 1.5))}
    after_spike = {
        "dynamic": dynamic,
        "delayed, max": delayed(),
        "delayed, most_recent": delayed(scale_fn_name="most_recent"),
        "delayed, max, window (1/64, 1.5)": delayed(dynamic_window=(1 / 64, 1.5)),
    }
    drifting = {"dynamic": dynamic, "delayed": delayed(), "static": static}
    return {
        "growth": Scenario(
            growth,
            {
                "dynamic": dynamic,
                "delayed, max": delayed(),
                "delayed, most_recent": delayed(scale_fn_name="most_recent"),
                "delayed, headroom 2": delayed(headroom=2.0),
                **windowed,
                "static": static,
            },
        ),
        "spike_1e3": Scenario([1e3 if step == EVENT else 1.0 for step in range(STEPS)], after_spike),
        "spike_1e6": Scenario([1e6 if step == EVENT else 1.0 for step in range(STEPS)], after_spike),
        "drift_up": Scenario([DRIFT_UP**step for step in range(DRIFT_STEPS)], drifting),
        "drift_down": Scenario([DRIFT_DOWN**step for step in range(DRIFT_STEPS)], drifting),
    }


def gaussian(seed: int, *shape: int) -> Tensor:
    """The same numbers for the same seed, whatever was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sqnr(exact: Tensor, result: Tensor) -> float:
    """In dB."""
    exact, result = exact.double(), result.double()
    return 20 * math.log10(float(exact.norm() / (exact - result).norm()))


def _linear(config: Float8LinearConfig) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(gaussian(1, DIM, DIM))
    convert_to_float8_training(model, config=config)
    if config.casts.input == config_of("static").casts.input:
        with calibrate_float8_static_scales(model):
            for seed in range(100, 104):
                model(gaussian(seed, TOKENS, DIM)).backward(gaussian(seed + 100, TOKENS, DIM))
    return model


def fare(deviations: list[float], config: Float8LinearConfig) -> dict[str, list[float]]:
    """The casts of the input at each step: SQNR, the saturated share, and `used_over_ideal`."""
    model = _linear(config)
    state = float8_scaling_state(model)
    series: dict[str, list[float]] = {"sqnr_db": [], "saturated": [], "used_over_ideal": []}
    for step, deviation in enumerate(deviations):
        x = deviation * gaussian(1000 + step, TOKENS, DIM)
        scale = state.state_dict().get("0.input.quant_scale", torch.tensor(0.0)).clone()
        codes, quant, _, seen = cast_with_persistent_scale(x, scale, E4M3)
        model(x)
        sync_float8_amax_and_scale_history(model)
        fared = next((tensor for tensor in state.report() if tensor.name == "0.input"), None)
        assert fared is None or fared.saturated == int(seen[1])  # the linear's own cast is this one
        series["sqnr_db"].append(sqnr(x, codes.double() / quant.double()))
        series["saturated"].append(float(seen[1]) / x.numel())
        series["used_over_ideal"].append(1.0 if fared is None else fared.used_over_ideal)
    return {name: [_rounded(value) for value in values] for name, values in series.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


RESULTS = ("output", "grad_input", "grad_weight")


def stationary(config: Float8LinearConfig) -> dict[str, list[float]]:
    """SQNR of the three results of a linear at each step, and `used_over_ideal` of its operands where it has any."""
    model = _linear(config)
    weight = model[0].weight.detach().double()
    state = float8_scaling_state(model)
    series: dict[str, list[float]] = {name: [] for name in RESULTS}
    for step in range(STEPS):
        x, grad_output = gaussian(1000 + step, TOKENS, DIM), gaussian(2000 + step, TOKENS, DIM)
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        output = model(leaf)
        output.backward(grad_output)
        sync_float8_amax_and_scale_history(model)
        exact = (x.double() @ weight.t(), grad_output.double() @ weight, grad_output.double().t() @ x.double())
        for name, reference, result in zip(RESULTS, exact, (output, leaf.grad, model[0].weight.grad), strict=True):
            series[name].append(_rounded(sqnr(reference, result.detach())))
        for tensor in state.report():
            operand = tensor.name.removeprefix("0.")
            series.setdefault(f"{operand}.used_over_ideal", []).append(_rounded(tensor.used_over_ideal))
            series.setdefault(f"{operand}.saturated", []).append(tensor.saturated)
    return series


POWERS = [step / 2 for step in range(-60, 17)]
OUTLIERS = 1000  # one element in so many is 64 times as large


def wrong_scales() -> dict[str, dict[str, list[float]]]:
    """The cast of a tensor with 2**power times the ideal scale: SQNR, and the shares that saturate and vanish."""
    plain = gaussian(0, 1024, 1024)
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
            quant = (FORMATS[dtype].max / amax(hp).double() * 2.0**power).float()
            codes = cast_to_float8(hp, quant, dtype).float()
            saturated = ((hp * quant).abs() > FORMATS[dtype].saturates_above).float().mean()
            zero = ((codes == 0) & (hp != 0)).float().mean()
            restored = codes.double() / quant.double()
            for key, value in (("sqnr_db", sqnr(hp, restored)), ("saturated", saturated), ("zero", zero)):
                series[key].append(_rounded(float(value)))
        results[name] = series
    return results


def measure_numerics() -> dict[str, Any]:
    """All series, by scenario and contestant."""
    return {
        "stationary": {name: stationary(config_of(name)) for name in ("tensorwise", "delayed")},
        "scenarios": {
            name: {contestant: fare(scenario.deviations, config) for contestant, config in scenario.contestants.items()}
            for name, scenario in scenarios().items()
        },
        "wrong_scales": wrong_scales(),
    }
