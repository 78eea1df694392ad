"""torch.compile's modules and settings. Imports the compiler.

- `OptimizedModule`: torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns. No replacement.
- `set_activation_memory_budget(budget)`: torch._functorch.config.activation_memory_budget. Replace by
  torch.autograd.graph.region_activation_memory_budget (torch 2.13) when it is no longer a prototype.
- `partition(joint, inputs, **options)`: torch._functorch.partitioners.min_cut_rematerialization_partition, Inductor's
  default. `CustomPartitionerFn` is the base class of other partitioners, and `install_partitioner(partitioner)` sets
  torch._inductor.config.custom_partitioner_fn. No replacements.
- `decompositions()`: torch._inductor.decomposition.select_decomp_table, of operators without a lowering.
  No replacement.
- `get_traced_backend()`: WrapBackendDebug._compiler_name of the frame that Dynamo traces, from
  torch._dynamo.symbolic_convert.tls. torch 2.11 keeps no name. No replacement.
- `BackendCompilerFailed`: torch._dynamo.exc.BackendCompilerFailed, which wraps an error of the backend. No replacement.
- `compile_like(copy, model)`: OptimizedModule.dynamo_ctx, the closure of Module._compiled_call_impl,
  torch._dynamo.trace_rules.check and torch._dynamo.external_utils.wrap_inline. No replacement.
- `count_graphs()`: torch._dynamo.utils.counters["stats"]["unique_graphs"]. No replacement.
- `recompile_limit(variants)`: torch._dynamo.config.patch of recompile_limit and accumulated_recompile_limit.
  No replacement.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass
import torch._inductor.decomposition
from torch import nn
from torch._dynamo import eval_frame, exc, trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import counters
from torch._functorch import partitioners

OptimizedModule = eval_frame.OptimizedModule
BackendCompilerFailed = exc.BackendCompilerFailed
CustomPartitionerFn = torch._inductor.custom_graph_pass.CustomPartitionerFn
partition = partitioners.min_cut_rematerialization_partition
decompositions = torch._inductor.decomposition.select_decomp_table


def set_activation_memory_budget(budget: float) -> None:
    """Set the share of activations that code compiled by this process from now on may save for backward."""
    functorch_config.activation_memory_budget = budget


def get_traced_backend() -> str | None:
    """Return the name of the backend for the code that Dynamo is tracing; None without a trace or a known name."""
    frame = getattr(symbolic_convert.tls, "current_tx", None)
    return None if frame is None else getattr(frame.output.compiler_fn, "_compiler_name", None)


def count_graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process. A function that fell back to eager has none."""
    return int(counters["stats"]["unique_graphs"])


def compile_like(copy: nn.Module, model: nn.Module) -> None:
    """Compile `copy` and its modules in the same way as `model`, since a copy is not compiled.

    Args:
        model: the original, possibly in a wrapper of torch.compile, which `copy` does not have.
    Raises:
        NotImplementedError: a module was not compiled by `nn.Module.compile`.
    """
    if isinstance(model, OptimizedModule):
        call = copy._call_impl
        is_skipped = trace_rules.check(copy.forward)  # Dynamo skips frames of torch's modules unless inlined
        copy._compiled_call_impl = model.dynamo_ctx(wrap_inline(call) if is_skipped else call)
        model = model._orig_mod
    copies = dict(copy.named_modules())
    for name, module in model.named_modules():
        compiled: Any = module._compiled_call_impl
        if compiled is None:
            continue
        wrap = inspect.getclosurevars(compiled).nonlocals.get("self")  # has torch.compile's backend and options
        if not callable(wrap):
            raise NotImplementedError(
                f"expected a module that nn.Module.compile compiled, got one that calls {compiled!r}; call "
                "module.compile() instead"
            )
        copies[name]._compiled_call_impl = wrap(copies[name]._call_impl)


def recompile_limit(variants: int) -> AbstractContextManager[Any]:
    """Raise Dynamo's limit on the variants of a function to `variants` inside the block, in this thread.

    The default limit, 8, is not lowered. Above the limit, a function compiled with fullgraph=True raises an error, and
    other functions run eagerly.
    """
    limit = max(variants, dynamo_config.recompile_limit)
    accumulated_limit = max(limit, dynamo_config.accumulated_recompile_limit)
    return dynamo_config.patch(recompile_limit=limit, accumulated_recompile_limit=accumulated_limit)


def install_partitioner(partitioner: CustomPartitionerFn) -> None:
    """Use `partitioner` for the joint graphs that this process compiles from now on, unless its class is installed.

    Another partitioner that is set later takes its place.

    Raises:
        RuntimeError: another partitioner is installed.
    """
    installed = inductor_config.custom_partitioner_fn
    if installed is None:
        inductor_config.custom_partitioner_fn = partitioner
        logging.getLogger(__name__).info(
            "torch._inductor.config.custom_partitioner_fn is now a %s", type(partitioner).__name__
        )
    elif type(installed) is not type(partitioner):
        raise RuntimeError(
            f"torch._inductor.config.custom_partitioner_fn is {type(installed).__name__}; it must be None, because "
            f"{type(partitioner).__name__} takes its place"
        )
