"""Dynamic, delayed and static scaling: the all-reduces of each, and how its scales fit; with pictures.

    python -m benchmarks.scaling --update-docs
    python -m benchmarks.scaling --recorded --update-docs

The second draws the table and the pictures of docs/scaling.md again from the recorded figures. Runs on a CPU and starts
2 gloo processes. Inputs are seeded, and nothing is timed, so the figures do not depend on the machine.

A contestant of a scenario is a real linear. Its inputs are Gaussian, with a standard deviation that follows the
scenario; all contestants get the same ones. SQNR is 20 log10(norm(exact) / norm(exact - result)), in dB.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import distributed
from benchmarks.record import ROOT, make_page, markdown, on_ranks, page_parser, provenance
from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    ScalingType,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    float8_scaling_state,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from quaver.formats import FORMATS
from quaver.scaling import amax, cast_to_float8, cast_with_persistent_scale

RECORD = ROOT / "benchmarks" / "results" / "scaling.json"
DOCS = ROOT / "docs" / "scaling.md"
IMAGES = ROOT / "docs" / "images"
RANKS = 2
TOKENS, DIM = 512, 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

RECIPES = ("tensorwise", "delayed", "delayed_with_dynamic_weight", "static")
LAYOUTS = {
    "fsdp": "FSDP2, two blocks, float8 all-gather",
    "feed-forward": "tensor parallel feed-forward",
    "attention": "tensor parallel attention",
}
_STATIC = CastConfig(scaling_type=ScalingType.STATIC)


def config_of(recipe: str, **rule: Any) -> Float8LinearConfig:
    """The config of a recipe, with a rule of delayed scaling; "static" is no recipe: every scale is calibrated."""
    if recipe == "static":
        return Float8LinearConfig(
            cast_config_input=_STATIC, cast_config_weight=_STATIC, cast_config_grad_output=_STATIC
        )
    config = Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, delayed_scaling_config=DelayedScalingConfig(**rule)) if rule else config


def count_on_rank(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """The all-reduces of every layout and recipe."""
    return [count_all_reduces(mesh, layout, recipe) for layout in LAYOUTS for recipe in RECIPES]


def count_all_reduces(mesh: DeviceMesh, layout: str, recipe: str) -> dict[str, Any]:
    """The all-reduces of amaxes and scales in a step after the first ones, by phase, and their bytes."""
    torch.manual_seed(0)
    model, x = _fsdp(mesh, recipe) if layout == "fsdp" else _tensor_parallel(mesh, layout, recipe)
    if recipe == "static":
        with calibrate_float8_static_scales(model):
            model(x).square().mean().backward()
    phases: dict[str, distributed.Collectives] = {}
    for _ in range(3):  # the first steps check that ranks agree, and initialize the scales
        phases = {name: distributed.Collectives() for name in ("forward", "backward", "sync", "precompute")}
        with phases["forward"]:
            loss = model(x).square().mean()
        with phases["backward"]:
            loss.backward()
        if recipe != "static":
            with phases["sync"]:
                sync_float8_amax_and_scale_history(model)
        if layout == "fsdp":
            with phases["precompute"]:
                precompute_float8_dynamic_scale_for_fsdp(model)
    counts = {name: counted.total("all_reduce", torch.int32, torch.float32) for name, counted in phases.items()}
    return {
        "parallel": layout,
        "recipe": recipe,
        "all_reduces": {name: calls for name, (calls, _) in counts.items()},
        "bytes": sum(size for _, size in counts.values()),
    }


_SIBLINGS = (("q", "k", "v"), ("gate", "up"))


def _fsdp(mesh: DeviceMesh, recipe: str) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(distributed.Block(), distributed.Block())
    config = replace(config_of(recipe), enable_fsdp_float8_all_gather=True, shared_inputs=_SIBLINGS)
    convert_to_float8_training(model, config=config)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, torch.randn(distributed.BATCH, distributed.SEQUENCE, distributed.DIM)


def _tensor_parallel(mesh: DeviceMesh, layout: str, recipe: str) -> tuple[nn.Module, Tensor]:
    make, last = {"feed-forward": (distributed.FeedForward, "down"), "attention": (distributed.Attention, "o")}[layout]
    model = make().to(torch.bfloat16)
    convert_to_float8_training(model, config=replace(config_of(recipe), shared_inputs=_SIBLINGS))
    styles: dict[str, Any] = {name: Float8ColwiseParallel() for name, _ in model.named_children() if name != last}
    styles[last] = Float8RowwiseParallel(output_layouts=Shard(1))
    styles[""] = PrepareFloat8ModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(model, mesh, styles)
    shape = (distributed.BATCH, distributed.SEQUENCE // mesh.size(), distributed.DIM)
    return model, torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


Scenario = tuple[list[float], dict[str, Float8LinearConfig]]
"""The standard deviation of the input at each step, and the contestants: a name, and a config."""


def scenarios() -> dict[str, Scenario]:
    """The scenarios by name: growth in steps 10 to 19, spikes in step 10, and drifts."""
    always = {"dynamic": config_of("tensorwise"), "delayed": config_of("delayed")}
    with_static = {**always, "static": config_of("static")}
    growing = {
        "delayed, headroom 2": config_of("delayed", headroom=2.0),
        "delayed, window (0, 1.5)": config_of("delayed", dynamic_window=(0.0, 1.5)),
    }
    after_spike = {
        "delayed, most_recent": config_of("delayed", scale_fn_name="most_recent"),
        "delayed, window (1/64, 1.5)": config_of("delayed", dynamic_window=(1 / 64, 1.5)),
    }
    return {
        "growth": ([2.0 ** min(max(step - 9, 0), 10) for step in range(40)], {**with_static, **growing}),
        "spike_1e3": ([1e3 if step == 10 else 1.0 for step in range(40)], {**always, **after_spike}),
        "spike_1e6": ([1e6 if step == 10 else 1.0 for step in range(40)], {**always, **after_spike}),
        "drift_up": ([1.08**step for step in range(60)], with_static),
        "drift_down": ([0.75**step for step in range(60)], with_static),
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


def measure() -> dict[str, Any]:
    """All figures, on one thread: all-reduces, and series by scenario and contestant."""
    torch.set_num_threads(1)
    return {
        "environment": provenance("scaling", ranks=RANKS, backend="gloo"),
        "linear": {"tokens": TOKENS, "dim": DIM},
        "all_reduces": on_ranks(RANKS, count_on_rank)[0],
        "scenarios": {
            name: {contestant: fare(deviations, config) for contestant, config in contestants.items()}
            for name, (deviations, contestants) in scenarios().items()
        },
        "wrong_scales": wrong_scales(),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The table of the documentation: a line for each layout, a column for each recipe."""
    cells = {(row["parallel"], row["recipe"]): _all_reduces_cell(row) for row in results["all_reduces"]}
    rows = [[name, *(cells[layout, recipe] for recipe in RECIPES)] for layout, name in LAYOUTS.items()]
    return {"all_reduces": markdown(["layout", *(f"`{recipe}`" for recipe in RECIPES)], rows)}


def _all_reduces_cell(row: dict[str, Any]) -> str:
    calls = [f"{phase} {count}" for phase, count in row["all_reduces"].items() if count]
    return ", ".join([*calls, f"{row['bytes']} bytes"]) if calls else "none"


_DASHED, _DOTTED = (0, (5, 2)), (0, (1, 1))
_STYLE: dict[str, dict[str, Any]] = {
    "dynamic": {"color": "0.55", "linewidth": 4, "zorder": 1},
    "delayed": {"color": "tab:blue"},
    "delayed, most_recent": {"color": "tab:green", "linestyle": _DASHED},
    "delayed, headroom 2": {"color": "tab:purple", "linestyle": (0, (4, 1, 1, 1))},
    "delayed, window (0, 1.5)": {"color": "tab:orange", "marker": "o", "markersize": 4, "linestyle": "none"},
    "delayed, window (1/64, 1.5)": {"color": "tab:orange", "marker": "o", "markersize": 4, "linestyle": "none"},
    "static": {"color": "tab:red", "linestyle": _DOTTED},
    "e4m3, Gaussian": {"color": "tab:blue"},
    "e5m2, Gaussian": {"color": "tab:green", "linestyle": _DASHED},
    "e4m3, Gaussian with outliers": {"color": "tab:orange", "linestyle": _DOTTED},
}
_LABELS = {
    "sqnr_db": "SQNR of the cast, dB",
    "saturated": "saturated elements, %",
    "zero": "became zero, %",
    "used_over_ideal": "used_over_ideal",
}
PICTURES = {
    "scaling_growth.png": {"growth": "The input doubles at each of ten steps, then stays"},
    "scaling_spike.png": {"spike_1e3": "Step 10: 1,000 times as large", "spike_1e6": "1,000,000 times as large"},
    "scaling_drift.png": {"drift_up": "8 % larger each step", "drift_down": "25 % smaller each step"},
    "scaling_wrong_scale.png": {},
}
"""The scenarios of each picture, one column each, and their titles; the last one is of `wrong_scales`."""


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write every picture to `folder`: the same bytes for the same results and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    style = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "lines.linewidth": 1.8, "legend.frameon": False}
    for name, columns in PICTURES.items():
        with matplotlib.rc_context(style):
            figure = _scenarios(results["scenarios"], columns) if columns else _wrong_scale(results["wrong_scales"])
            handles, names = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=3)
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plot(axis: Any, measure: str, contestants: dict[str, dict[str, list[float]]], **options: Any) -> None:
    """One line for each contestant, over steps or its own powers."""
    for name, series in contestants.items():
        values = [100 * value for value in series[measure]] if measure in ("saturated", "zero") else series[measure]
        axis.plot(series.get("power", range(len(values))), values, label=name, **options, **_STYLE[name])


def _scenarios(scenarios: dict[str, Any], columns: dict[str, str]) -> Figure:
    """One column a scenario, one row a measure."""
    figure = _figure(11, 8.2)
    measures = ("sqnr_db", "saturated", "used_over_ideal")
    axes = figure.subplots(len(measures), len(columns), sharex="col", sharey="row", squeeze=False)
    for (scenario, title), column in zip(columns.items(), axes.T, strict=True):
        for measure, axis in zip(measures, column, strict=True):
            _plot(axis, measure, scenarios[scenario], drawstyle="steps-mid")
        column[0].set(title=title, ylim=(-1.5, 35))
        column[1].set_yscale("symlog", linthresh=1)
        column[1].set_ylim(-0.2, 150)
        column[2].set_yscale("log", base=2)
        column[2].yaxis.set_major_locator(LogLocator(base=2**8, numticks=12))
        column[2].axhline(1, color="0.3", linewidth=0.8)
        column[2].set_xlabel("step")
    for measure, axis in zip(measures, axes[:, 0], strict=True):
        axis.set_ylabel(_LABELS[measure])
    return figure


def _wrong_scale(tensors: dict[str, Any]) -> Figure:
    figure = _figure(12, 4.2)
    measures = ("sqnr_db", "saturated", "zero")
    for measure, axis in zip(measures, figure.subplots(1, len(measures)), strict=True):
        _plot(axis, measure, tensors)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set(xlabel="log2(used_over_ideal)", title=_LABELS[measure], xticks=range(-28, 9, 4), xlim=(-30, 8))
    figure.suptitle("A scale too large saturates at once; one too small costs little until values become zero")
    return figure


def main() -> None:
    options = page_parser(__doc__).parse_args()
    results = make_page(options, measure, RECORD, tables, DOCS)
    if options.update_docs:
        draw(results, IMAGES)


if __name__ == "__main__":
    main()
