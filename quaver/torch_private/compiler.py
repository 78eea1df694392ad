"""torch.compile's modules and settings. Imports the compiler.

- `OptimizedModule`: torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns. No replacement.
- `set_activation_memory_budget(budget)`: torch._functorch.config.activation_memory_budget. Can go with
  torch.autograd.graph.region_activation_memory_budget once that is no prototype (torch 2.13).
- `partition(joint, inputs, **options)`: torch._functorch.partitioners.min_cut_rematerialization_partition, Inductor's
  own. `CustomPartitionerFn` is the class of another, `install_partitioner(partitioner)` sets
  torch._inductor.config.custom_partitioner_fn. No replacements.
- `decompositions()`: torch._inductor.decomposition.select_decomp_table, of operators without a lowering.
  No replacement.
- `traced_for()`: the name of the backend, WrapBackendDebug._compiler_name, of the frame that Dynamo translates, from
  torch._dynamo.symbolic_convert.tls. torch 2.11 keeps no name. No replacement.
- `graph_count()`: torch._dynamo.utils.counters["stats"]["unique_graphs"]. No replacement.
- `recompile_limit(variants)`: torch._dynamo.config.patch of recompile_limit and accumulated_recompile_limit.
  No replacement.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition as partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table as decompositions

__all__ = [
    "CustomPartitionerFn",
    "OptimizedModule",
    "decompositions",
    "graph_count",
    "install_partitioner",
    "partition",
    "recompile_limit",
    "set_activation_memory_budget",
    "traced_for",
]


def set_activation_memory_budget(budget: float) -> None:
    """Set the share of what could be saved for backward that this process's compiled code saves from now on."""
    functorch_config.activation_memory_budget = budget


def traced_for() -> str | None:
    """The name of the backend that gets the code that Dynamo traces now; None if it traces none, or nobody knows."""
    frame = getattr(symbolic_convert.tls, "current_tx", None)
    return None if frame is None else getattr(frame.output.compiler_fn, "_compiler_name", None)


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process: none of a function that it gave up, which runs eagerly."""
    return int(counters["stats"]["unique_graphs"])


def recompile_limit(variants: int) -> AbstractContextManager[Any]:
    """Inside the block Dynamo compiles up to so many variants of a function, or 8, its own limit.

    The limit is this thread's. A function that is compiled with fullgraph=True ends with an error above it, others run
    eagerly.
    """
    most = max(variants, dynamo_config.recompile_limit)
    in_all = max(most, dynamo_config.accumulated_recompile_limit)
    limited: AbstractContextManager[Any] = dynamo_config.patch(recompile_limit=most, accumulated_recompile_limit=in_all)
    return limited


def install_partitioner(partitioner: CustomPartitionerFn) -> None:
    """Let `partitioner` cut the joint graphs that this process compiles from now on, unless one of its class does.

    Raises:
        RuntimeError: another partitioner is installed.
    """
    installed = inductor_config.custom_partitioner_fn
    if installed is None:
        inductor_config.custom_partitioner_fn = partitioner
    elif type(installed) is not type(partitioner):
        raise RuntimeError(
            f"torch._inductor.config.custom_partitioner_fn is {type(installed).__name__}; it must be None, because "
            f"{type(partitioner).__name__} takes its place"
        )
