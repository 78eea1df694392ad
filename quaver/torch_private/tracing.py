"""Who traces operators. No replacements.

- `is_jit_tracing()`: torch._C._is_tracing, under torch.jit.trace; torch.jit.is_tracing is a Python function around it.
- `is_exporting()`: torch.compiler._is_exporting_flag, under torch.export, strict or not. Dynamo of torch 2.11 takes
  torch.compiler.is_exporting() for True in all that it compiles (https://github.com/pytorch/pytorch/issues/176347);
  2.13 is right, 2.12 was not tried. Can go for the public one when the oldest torch is right.
- `current_tracing_context()`: torch._guards.TracingContext.try_get, of Dynamo and AOTAutograd, else None.
- `fake_tensors_ask()`: whether torch._subclasses.meta_utils calls the caller. It makes fake tensors, those of a
  non-strict torch.export without a tracing context, and takes tensors of one storage for views.
- `FakeTensor`, `FakeTensorMode`: torch._subclasses.fake_tensor, tensors without memory and the mode that makes them.
- `assume_constant_result(function)`: sets what torch.compiler.assume_constant_result sets, which imports torch._dynamo
  first ([Note: import time] in dtensor.py). Can go when it does not.
- `disable_compile(function)`: torch._compile._disable_dynamo, as torch.compiler.disable, but imports torch._dynamo at
  the first call. Can go likewise.

Whether Dynamo traces is public: torch.compiler.is_dynamo_compiling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo as disable_compile
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "assume_constant_result",
    "current_tracing_context",
    "disable_compile",
    "fake_tensors_ask",
    "is_exporting",
    "is_jit_tracing",
]

is_jit_tracing = torch._C._is_tracing
current_tracing_context = TracingContext.try_get


def is_exporting() -> bool:
    """Whether torch.export records what runs; Dynamo guards on it."""
    return torch.compiler._is_exporting_flag


def fake_tensors_ask() -> bool:
    """Whether the caller is called by what makes fake tensors of others."""
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` while it traces, and take the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
