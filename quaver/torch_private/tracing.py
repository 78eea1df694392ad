"""Who traces operators. No replacements.

- `is_jit_tracing()`: torch._C._is_tracing, under torch.jit.trace; torch.jit.is_tracing is a Python function around it.
- `current_tracing_context()`: torch._guards.TracingContext.try_get, of Dynamo and AOTAutograd, else None.
- `FakeTensor`, `FakeTensorMode`: torch._subclasses.fake_tensor, tensors without memory and the mode that makes them.

Whether Dynamo traces is public: torch.compiler.is_dynamo_compiling.
"""

from __future__ import annotations

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "current_tracing_context", "is_jit_tracing"]

is_jit_tracing = torch._C._is_tracing
current_tracing_context = TracingContext.try_get
