"""One linear, forward and backward: quaver per recipe against bfloat16 `nn.Linear` and, if installed, torchao.float8.

Each call gets the next of several equal inputs and gradients as a new tensor object (harness.Rotation), so no library
can reuse a result; the weight stays the same. Delayed scales are initialized before the clock starts; updating them is
one call per step for a whole model, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from quaver.bench.harness import Rotation, time_alternating
from quaver.bench.peer import is_peer_recipe, torchao_linear
from quaver.bench.results import BFLOAT16, Row, Setup, contestant_rows, run_cases
from quaver.bench.shapes import Shape
from quaver.config import Float8LinearConfig
from quaver.convert import convert_to_float8_training
from quaver.delayed import sync_float8_amax_and_scale_history

Batch = tuple[Tensor, Tensor]
"""The input [M, K] of a linear and the gradient [M, N] of its output."""


def bench_linear(setup: Setup, shapes: Sequence[Shape], recipes: Sequence[str], modes: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark; returns `results.result` of a row for each shape, mode and contestant."""

    def rows_of(shape: Shape, mode: str) -> list[Row]:
        steps = linear_steps(setup, shape, recipes, mode)
        rows = contestant_rows(time_alternating(steps, setup.device, rounds=setup.rounds))
        made = []
        for row in rows.values():
            peer = rows.get(f"torchao {row['recipe']}") if row["library"] == "quaver" else None
            ratio = None if peer is None else peer["timing"]["median_us"] / row["timing"]["median_us"]
            made.append({"shape": str(shape), "mode": mode, **row, "torchao_time_over_this": ratio})
        return made

    return run_cases("linear", setup, product(shapes, modes), rows_of, dtype=str(setup.dtype))


def linear_steps(setup: Setup, shape: Shape, recipes: Sequence[str], mode: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of each contestant by name: "bfloat16", "quaver RECIPE", "torchao RECIPE"."""
    device, dtype = setup.device, setup.dtype

    def plain() -> nn.Module:
        return nn.Linear(shape.k, shape.n, bias=False, device=device, dtype=dtype)

    modules: dict[str, nn.Module] = {BFLOAT16: plain().to(torch.bfloat16)}
    for recipe in recipes:
        config = Float8LinearConfig.from_recipe_name(recipe)
        modules[f"quaver {recipe}"] = convert_to_float8_training(plain(), config=config)
        if setup.with_torchao and is_peer_recipe(recipe):
            modules[f"torchao {recipe}"] = torchao_linear(plain(), recipe, device=device)
    batches = _batches(shape, device, dtype)
    plain_batches = batches if dtype is torch.bfloat16 else _batches(shape, device, torch.bfloat16)
    steps = {
        name: _step(module, mode, plain_batches if name == BFLOAT16 else batches) for name, module in modules.items()
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
