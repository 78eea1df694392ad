"""One linear, forward and backward: quaver per recipe against bfloat16 `nn.Linear` and, if installed, torchao.float8.

The input is a new tensor object at each call, so that no library can remember anything of it between calls. Delayed
scales are known before the clock starts: what brings them forward runs once a step for a whole model, and is timed by
benchmarks/scaling.py.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from quaver.bench.harness import Timing, environment, time_alternating
from quaver.bench.shapes import Shape
from quaver.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.convert import convert_to_float8_training
from quaver.delayed import sync_float8_amax_and_scale_history

MODES = ("eager", "compiled")

_TORCHAO_RECIPES = (
    Float8LinearRecipeName.TENSORWISE,
    Float8LinearRecipeName.ROWWISE,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP,
)


@dataclass(frozen=True)
class Row:
    """One contestant on one shape. The ratios are of medians: to bfloat16 `nn.Linear`, and torchao's to ours."""

    shape: str
    mode: str
    library: str
    recipe: str
    timing: Timing
    time_over_bfloat16: float
    torchao_time_over_this: float | None


def bench_linear(
    shapes: list[Shape],
    recipes: list[str],
    modes: list[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    with_torchao: bool,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the benchmark; returns {"environment": ..., "rows": [...]}, ready for JSON."""
    rows: list[Row] = []
    for shape in shapes:
        for mode in modes:
            report(f"{shape}, {mode}")
            torch.compiler.reset()
            contestants = _contestants(shape, recipes, mode, device, dtype, with_torchao)
            rows += _rows(shape, mode, time_alternating(contestants, device, rounds=rounds))
    about = environment(device)
    if with_torchao:
        about["torchao"] = importlib.metadata.version("torchao")
    return {"environment": about, "dtype": str(dtype), "rows": [asdict(row) for row in rows]}


def torchao_is_installed() -> bool:
    """Whether the peer can be compared with."""
    return importlib.util.find_spec("torchao") is not None


def _rows(shape: Shape, mode: str, timings: dict[str, Timing]) -> list[Row]:
    baseline = timings["bfloat16"].median_us
    rows = []
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        peer = timings.get(f"torchao {recipe}") if library == "quaver" else None
        against_peer = None if peer is None else peer.median_us / timing.median_us
        rows.append(Row(str(shape), mode, library, recipe, timing, timing.median_us / baseline, against_peer))
    return rows


def _contestants(
    shape: Shape, recipes: list[str], mode: str, device: torch.device, dtype: torch.dtype, with_torchao: bool
) -> dict[str, Callable[[], None]]:
    def plain() -> nn.Module:
        return nn.Linear(shape.k, shape.n, bias=False, device=device, dtype=dtype)

    modules: dict[str, nn.Module] = {"bfloat16": plain().to(torch.bfloat16)}
    for recipe in recipes:
        config = Float8LinearConfig.from_recipe_name(recipe)
        modules[f"quaver {recipe}"] = convert_to_float8_training(plain(), config=config)
        if with_torchao and Float8LinearRecipeName(recipe) in _TORCHAO_RECIPES:
            modules[f"torchao {recipe}"] = _torchao_linear(plain(), recipe, emulate=device.type != "cuda")
    input = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
    grad_output = torch.randn(shape.m, shape.n, device=device, dtype=dtype)
    steps = {name: _step(module, mode, input, grad_output) for name, module in modules.items()}
    for name, module in modules.items():
        steps[name]()
        sync_float8_amax_and_scale_history(module)
    return steps


def _step(module: nn.Module, mode: str, input: torch.Tensor, grad_output: torch.Tensor) -> Callable[[], None]:
    forward = torch.compile(module, fullgraph=True) if mode == "compiled" else module
    parameters = list(module.parameters())
    input, grad_output = (tensor.to(parameters[0].dtype) for tensor in (input, grad_output))

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        forward(input.detach().requires_grad_()).backward(grad_output)

    return step


def _torchao_linear(linear: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    logging.getLogger("torchao").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig as PeerConfig
        from torchao.float8 import convert_to_float8_training

        config = replace(PeerConfig.from_recipe_name(recipe), emulate=emulate)
        return convert_to_float8_training(nn.Sequential(linear), config=config)[0]
