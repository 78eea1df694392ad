"""Checks compiled code: gradients of compiled blocks and experts against those of eager code and of bfloat16.

Compiled code keeps float32 inside a fused chain, where eager code rounds to bfloat16, so some codes differ by a step.
A wrong layout, scale or kernel destroys the signal. `MIN_SQNR_DB` lies between: noise of a fifth of the signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.contestants import QUAVER, make_inputs, make_step, select_contestants
from benchmarks.gpu_parts.other_measurements import make_grouped_step
from benchmarks.gpu_parts.part_context import PartContext, Row, catch_failures
from quaver import float8_grouped_mm
from quaver.lab.settings.float8 import BFLOAT16

MIN_SQNR_DB = 14.0
RECIPES_OF_EXPERTS = ("rowwise", "tensorwise", "blockwise")


def compare_gradients(context: PartContext) -> Iterator[Row]:
    """Yield a row for each recipe; `is_wrong` stops the timings."""
    inputs = make_inputs(context)
    exact = _compute_gradients(context, BFLOAT16, inputs, compiled=False)
    names = select_contestants(context, QUAVER)
    yield from catch_failures(({"what": name}, partial(_compare_block, context, name, inputs, exact)) for name in names)
    exact = _compute_expert_gradients(context, None, compiled=False)
    yield from catch_failures(
        ({"what": f"experts, {recipe}"}, partial(_compare_experts, context, recipe, exact))
        for recipe in RECIPES_OF_EXPERTS
    )


def _compare_block(
    context: PartContext, name: str, inputs: tuple[Tensor, Tensor], exact: list[Tensor]
) -> Iterator[Row]:
    yield _judge(exact, *(_compute_gradients(context, name, inputs, compiled=compiled) for compiled in (False, True)))


def _compare_experts(context: PartContext, recipe: str, exact: list[Tensor]) -> Iterator[Row]:
    yield _judge(exact, *(_compute_expert_gradients(context, recipe, compiled=compiled) for compiled in (False, True)))


def _judge(exact: list[Tensor], eager: list[Tensor], compiled: list[Tensor]) -> Row:
    of_eager, of_bfloat16 = compute_lowest_db(eager, compiled), compute_lowest_db(exact, compiled)
    wrong = not min(of_eager, of_bfloat16) >= MIN_SQNR_DB  # NaN is wrong
    return {"beside_eager_db": of_eager, "beside_bfloat16_db": of_bfloat16, "is_wrong": wrong}


def _compute_gradients(
    context: PartContext, name: str, inputs: tuple[Tensor, Tensor], *, compiled: bool
) -> list[Tensor]:
    torch.compiler.reset()
    step = make_step(context, name, inputs, compiled=compiled)
    step.settle()
    return step.copy_gradients()


def _compute_expert_gradients(context: PartContext, recipe: str | None, *, compiled: bool) -> list[Tensor]:
    """Return the gradients of ragged experts of the model's width; in bfloat16 without a recipe."""
    torch.compiler.reset()
    multiply = F.grouped_mm if recipe is None else partial(float8_grouped_mm, config=recipe)
    if compiled:
        multiply = torch.compile(multiply, fullgraph=True, **({"backend": "aot_eager"} if context.dry else {}))
    dim, hidden = context.model.dim, context.model.hidden_dim
    step, tensors = make_grouped_step(context, dim, hidden, lambda a, b_t, ends: multiply(a, b_t, offs=ends))
    step()
    return [tensor.grad.float().clone() for tensor in tensors if tensor.grad is not None]


def compute_lowest_db(expected: list[Tensor], actual_gradients: list[Tensor]) -> float:
    """Return the lowest SQNR of pairs of gradients; NaN if a gradient is not finite or the numbers differ."""
    if len(expected) != len(actual_gradients) or not expected:
        return math.nan
    decibels = []
    for reference, actual in zip(expected, actual_gradients, strict=True):
        noise = (reference.double() - actual.double()).norm()
        decibels.append(float(20 * torch.log10(reference.double().norm() / noise.clamp(min=1e-300))))
    return math.nan if any(map(math.isnan, decibels)) else min(decibels)
