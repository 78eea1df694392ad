"""Which tracer is active. No replacements.

- `is_jit_tracing()`: torch._C._is_tracing, for torch.jit.trace; torch.jit.is_tracing is a Python function around it.
- `is_exporting()`: torch.compiler._is_exporting_flag, for torch.export, strict or not. Dynamo of torch 2.11 evaluates
  torch.compiler.is_exporting() to True everywhere (https://github.com/pytorch/pytorch/issues/176347); 2.13 is fixed,
  2.12 was not tried. Use the public function when the oldest torch is fixed.
- `current_tracing_context()`: torch._guards.TracingContext.try_get, of Dynamo and AOTAutograd, else None.
- `is_called_by_fake_tensors()`: whether torch._subclasses.meta_utils calls the caller. It creates fake tensors, in a
  non-strict torch.export without a tracing context, and treats tensors of one storage as views.
- `FakeTensor`, `FakeTensorMode`, `FakeCopyMode`: torch._subclasses.fake_tensor, tensors without memory, the mode that
  creates them, and the mode in which copy.deepcopy creates them.
- `DataDependentOutputException`, `DynamicOutputShapeException`, `UnsupportedOperatorException`: the errors of operators
  that fake tensors cannot run.
- `assume_constant_result(function)`: torch.compiler.assume_constant_result without its import of torch._dynamo
  ([Note: import time] in dtensor.py). Remove when PyTorch defers the import.
- `disable_compile(function)`: torch._compile._disable_dynamo, which is torch.compiler.disable but imports torch._dynamo
  at the first call. Remove when PyTorch defers the import.

torch.compiler.is_dynamo_compiling, for Dynamo, is public.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._compile
import torch._guards
import torch._subclasses.fake_tensor as fake_tensor

DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
FakeCopyMode = fake_tensor.FakeCopyMode
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
is_jit_tracing = torch._C._is_tracing
current_tracing_context = torch._guards.TracingContext.try_get
disable_compile = torch._compile._disable_dynamo


def is_exporting() -> bool:
    """Return whether torch.export is tracing; Dynamo guards on it."""
    return torch.compiler._is_exporting_flag


def is_called_by_fake_tensors() -> bool:
    """Return whether the caller of this function was called by code that converts tensors to fake tensors."""
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make Dynamo call `function` at trace time and treat the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
