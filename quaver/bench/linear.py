"""One linear, forward and backward: quaver per recipe against bfloat16 `nn.Linear` and, if installed, torchao.float8.

Each call has the next of several equal inputs and gradients, which together are larger than the last-level cache, as a
new tensor object, so that no library can remember anything of it between calls; the weight is the same one. Delayed
scales are known before the clock starts: what brings them forward runs once a step for a whole model, and is timed by
benchmarks/scaling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.bench.harness import Timing, time_alternating
from quaver.bench.peer import is_peer_recipe, torchao_linear
from quaver.bench.results import collecting, result
from quaver.bench.rotation import Rotation
from quaver.bench.shapes import Shape
from quaver.config import Float8LinearConfig
from quaver.convert import convert_to_float8_training
from quaver.delayed import sync_float8_amax_and_scale_history

MODES = ("eager", "compiled")


Batch = tuple[Tensor, Tensor]
"""The input [M, K] of a linear and the gradient [M, N] of its output."""


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
    """Run the benchmark; returns what `results.result` makes of its rows."""
    with collecting() as collected:
        for shape in shapes:
            for mode in modes:
                report(f"{shape}, {mode}")
                torch.compiler.reset()
                contestants = linear_steps(shape, recipes, mode, device, dtype, with_torchao)
                collected.rows += _rows(shape, mode, time_alternating(contestants, device, rounds=rounds))
    return result("linear", collected, device=device, with_torchao=with_torchao, dtype=str(dtype))


def _rows(shape: Shape, mode: str, timings: dict[str, Timing]) -> list[Row]:
    baseline = timings["bfloat16"].median_us
    rows = []
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        peer = timings.get(f"torchao {recipe}") if library == "quaver" else None
        against_peer = None if peer is None else peer.median_us / timing.median_us
        rows.append(Row(str(shape), mode, library, recipe, timing, timing.median_us / baseline, against_peer))
    return rows


def linear_steps(
    shape: Shape, recipes: list[str], mode: str, device: torch.device, dtype: torch.dtype, with_torchao: bool
) -> dict[str, Callable[[], None]]:
    """Forward and backward of each contestant by name: "bfloat16", "quaver RECIPE", "torchao RECIPE"."""

    def plain() -> nn.Module:
        return nn.Linear(shape.k, shape.n, bias=False, device=device, dtype=dtype)

    modules: dict[str, nn.Module] = {"bfloat16": plain().to(torch.bfloat16)}
    for recipe in recipes:
        config = Float8LinearConfig.from_recipe_name(recipe)
        modules[f"quaver {recipe}"] = convert_to_float8_training(plain(), config=config)
        if with_torchao and is_peer_recipe(recipe):
            modules[f"torchao {recipe}"] = torchao_linear(plain(), recipe, device=device)
    batches = _batches(shape, device, dtype)
    plain_batches = batches if dtype is torch.bfloat16 else _batches(shape, device, torch.bfloat16)
    steps = {
        name: _step(module, mode, plain_batches if name == "bfloat16" else batches) for name, module in modules.items()
    }
    for name, module in modules.items():
        steps[name]()
        sync_float8_amax_and_scale_history(module)
    return steps


def _batches(shape: Shape, device: torch.device, dtype: torch.dtype) -> Rotation[Batch]:
    input = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
    grad_output = torch.randn(shape.m, shape.n, device=device, dtype=dtype)
    return Rotation(lambda: (input.clone(), grad_output.clone()), input.nbytes + grad_output.nbytes, device)


def _step(module: nn.Module, mode: str, batches: Rotation[Batch]) -> Callable[[], None]:
    forward = torch.compile(module, fullgraph=True) if mode == "compiled" else module
    parameters = list(module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        input, grad_output = batches.next()
        forward(input.detach().requires_grad_()).backward(grad_output)

    return step
