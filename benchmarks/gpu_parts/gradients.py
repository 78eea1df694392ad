"""Whether compiled code is right: the gradients of each compiled block beside those of eager code and of bfloat16.

Compiled code keeps float32 inside a fused chain, where eager code rounds to bfloat16, so some codes differ by a step.
A wrong layout, scale or kernel leaves no signal. `LEAST_DB` is between the two: noise of a fifth of the signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.contestants import BFLOAT16, QUAVER, inputs_of, of_lab, step_of
from benchmarks.gpu_parts.lab import Lab, Row, failures_as_rows

LEAST_DB = 14.0


def gradients(lab: Lab) -> Iterator[Row]:
    """A row for each recipe; `is_wrong` stops the timings."""
    inputs = inputs_of(lab)
    exact = _gradients(lab, BFLOAT16, inputs, compiled=False)
    names = of_lab(lab, QUAVER)
    yield from failures_as_rows(({"what": name}, partial(_row, lab, name, inputs, exact)) for name in names)


def _row(lab: Lab, name: str, inputs: tuple[Tensor, Tensor], exact: list[Tensor]) -> Iterator[Row]:
    eager = _gradients(lab, name, inputs, compiled=False)
    compiled = _gradients(lab, name, inputs, compiled=True)
    of_eager, of_bfloat16 = lowest_db(eager, compiled), lowest_db(exact, compiled)
    wrong = not min(of_eager, of_bfloat16) >= LEAST_DB  # NaN is wrong
    yield {"beside_eager_db": of_eager, "beside_bfloat16_db": of_bfloat16, "is_wrong": wrong}


def _gradients(lab: Lab, name: str, inputs: tuple[Tensor, Tensor], *, compiled: bool) -> list[Tensor]:
    torch.compiler.reset()
    step = step_of(lab, name, inputs, compiled=compiled)
    step.settle()
    return step.gradients()


def lowest_db(expected: list[Tensor], found: list[Tensor]) -> float:
    """The lowest SQNR of pairs of gradients; NaN where one is not finite, or where there are not as many."""
    if len(expected) != len(found) or not expected:
        return math.nan
    decibels = []
    for reference, actual in zip(expected, found, strict=True):
        noise = (reference.double() - actual.double()).norm()
        decibels.append(float(20 * torch.log10(reference.double().norm() / noise.clamp(min=1e-300))))
    return math.nan if any(math.isnan(each) for each in decibels) else min(decibels)
