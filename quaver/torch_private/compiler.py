"""torch.compile's modules and settings. Imports the compiler.

- `OptimizedModule`: torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns. No replacement.
- `set_activation_memory_budget(budget)`: torch._functorch.config.activation_memory_budget. Can go with
  torch.autograd.graph.region_activation_memory_budget once that is no prototype (torch 2.13).
- `recompile_limit(variants)`: torch._dynamo.config.patch(recompile_limit=variants). No replacement.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch._dynamo.eval_frame import OptimizedModule

__all__ = ["OptimizedModule", "recompile_limit", "set_activation_memory_budget"]


def set_activation_memory_budget(budget: float) -> None:
    """Set the share of what could be saved for backward that this process's compiled code saves from now on."""
    functorch_config.activation_memory_budget = budget


def recompile_limit(variants: int) -> AbstractContextManager[Any]:
    """Inside the block Dynamo compiles up to so many variants of a function."""
    limited: AbstractContextManager[Any] = dynamo_config.patch(recompile_limit=variants)
    return limited
