"""One linear, forward and backward: quaver per recipe against bfloat16 `nn.Linear` and, if installed, torchao.float8.

Each call gets the next of several equal inputs and gradients as a new tensor object (harness.Rotation), so no library
can reuse a result; the weight stays the same. Delayed scales are initialized before the clock starts; updating them is
one call per step for a whole model, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.conversion.persistent_scales import sync_float8_amax_and_scale_history
from quaver.lab.bench.harness import Rotation, time_alternating
from quaver.lab.bench.options import ModeOptions, OperandOptions, RecipeOptions, ShapeOptions
from quaver.lab.bench.peer import is_peer_recipe, make_torchao_linear
from quaver.lab.bench.results import Result, Row, make_contestant_rows
from quaver.lab.bench.shapes import Shape
from quaver.lab.settings.float8 import BFLOAT16
from quaver.recipes.config import Float8LinearConfig

Batch = tuple[Tensor, Tensor]
"""The input [M, K] of a linear and the gradient [M, N] of its output."""


@dataclass(frozen=True)
class LinearOptions(ModeOptions, RecipeOptions, OperandOptions):
    """The contestants of benchmarks of a linear."""

    def make_steps(self, shape: Shape, mode: str) -> dict[str, Callable[[], None]]:
        """Return forward and backward of each contestant by name: "bfloat16", "quaver RECIPE", "torchao RECIPE"."""
        device, dtype = self.torch_device, self.torch_dtype
        m, k, n = shape.sizes

        def make_plain() -> nn.Module:
            return nn.Linear(k, n, bias=False, device=device, dtype=dtype)

        modules: dict[str, nn.Module] = {BFLOAT16: make_plain().to(torch.bfloat16)}
        for recipe in self.recipe_names:
            config = Float8LinearConfig.from_recipe_name(recipe)
            modules[f"quaver {recipe}"] = convert_to_float8_training(make_plain(), config=config)
            if self.with_torchao and is_peer_recipe(recipe):
                modules[f"torchao {recipe}"] = make_torchao_linear(make_plain(), recipe, device=device)
        batches = _make_batches(m, k, n, device, dtype)
        plain_batches = batches if dtype is torch.bfloat16 else _make_batches(m, k, n, device, torch.bfloat16)
        steps = {}
        for name, module in modules.items():
            steps[name] = _make_step(module, mode, plain_batches if name == BFLOAT16 else batches)
            steps[name]()
            sync_float8_amax_and_scale_history(module)
        return steps


@dataclass(frozen=True)
class LinearBenchmark(ShapeOptions, LinearOptions):
    """Forward and backward of one linear, per recipe, against bfloat16 nn.Linear and torchao."""

    shapes: str = "1024,16"

    case_fields = ("shape", "mode")
    tables = (("precision", "median", "spread", "time_over_bfloat16", "torchao_time_over_this"),)

    def measure(self) -> Result:
        """Return a row for each shape, mode and contestant."""
        cases = product(self.parse_shapes(), self.mode_names)
        return self.run_cases(cases, self._make_rows, dtype=str(self.torch_dtype))

    def _make_rows(self, shape: Shape, mode: str) -> list[Row]:
        steps = self.make_steps(shape, mode)
        rows = make_contestant_rows(time_alternating(steps, self.torch_device, rounds=self.rounds))
        result_rows = []
        for row in rows.values():
            peer = rows.get(f"torchao {row['recipe']}") if row["library"] == "quaver" else None
            ratio = None if peer is None else peer["timing"]["median_us"] / row["timing"]["median_us"]
            result_rows.append({"shape": str(shape), "mode": mode, **row, "torchao_time_over_this": ratio})
        return result_rows


def _make_batches(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> Rotation[Batch]:
    input, grad_output = (torch.randn(m, width, device=device, dtype=dtype) for width in (k, n))
    return Rotation(lambda: (input.clone(), grad_output.clone()), input.nbytes + grad_output.nbytes, device)


def _make_step(module: nn.Module, mode: str, batches: Rotation[Batch]) -> Callable[[], None]:
    forward = torch.compile(module, fullgraph=True) if mode == "compiled" else module
    parameters = list(module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        input, grad_output = batches.next()
        forward(input.detach().requires_grad_()).backward(grad_output)

    return step
