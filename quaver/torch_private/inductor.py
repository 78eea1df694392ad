"""Inductor up to its Python wrapper code. Imports Inductor, which is slow. No replacements.

- `disable_caches()`: settings of torch._inductor.config, torch._functorch.config and torch._dynamo.config.
- `list_enabled(settings)`: reads settings of torch._inductor.config.
- `replace_code(check_graph, make_module, materializes_as_gpu)`: replaces GraphLowering.run and
  GraphLowering._compile_to_module_lines of torch._inductor.graph, CppScheduling.try_loop_split of
  torch._inductor.codegen.cpp, torch._inductor.cpu_vec_isa.valid_vec_isa_list and torch._inductor.ir.is_cpu.
- `count_forward_results()`: ViewAndMutationMeta of torch._guards.TracingContext.fw_metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.ir
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.graph import GraphLowering

from quaver.torch_private.replacing import replace_attribute
from quaver.torch_private.tracing import current_tracing_context


@contextmanager
def disable_caches() -> Iterator[None]:
    """Turn off the caches of Dynamo, AOTAutograd and Inductor, and Inductor's worker processes, inside the block."""
    inductor = dict.fromkeys(("fx_graph_cache", "fx_graph_remote_cache"), False)
    functorch = dict.fromkeys(("enable_autograd_cache", "enable_remote_autograd_cache"), False)
    dynamo = dict.fromkeys(("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo"), False)
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch({**inductor, "compile_threads": 1}))
        stack.enter_context(functorch_config.patch(functorch))
        stack.enter_context(dynamo_config.patch(dynamo))
        yield


def list_enabled(settings: Iterable[str]) -> list[str]:
    """Return the names of Inductor's settings that are on."""
    return [name for name in settings if getattr(inductor_config, name)]


@contextmanager
def replace_code(
    check_graph: Callable[[Any], None], make_module: Callable[[Any, str], ModuleType], *, materializes_as_gpu: bool
) -> Iterator[None]:
    """Replace the code that Inductor generates for a CPU inside the block.

    Args:
        check_graph: called with each GraphLowering before and after its operators are lowered.
        make_module: called with a GraphLowering and its wrapper code; returns the module to run in place of it.
        materializes_as_gpu: materialize the results that code for a GPU materializes, instead of inlining them.
    """
    run = GraphLowering.run

    def run_checked(graph: Any, *arguments: Any) -> Any:
        check_graph(graph)
        result = run(graph, *arguments)
        check_graph(graph)
        return result

    def compile_to_module(graph: Any, wrapper_code: Any) -> ModuleType:
        return make_module(graph, wrapper_code.value)

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(GraphLowering, "run", run_checked))
        stack.enter_context(replace_attribute(GraphLowering, "_compile_to_module_lines", compile_to_module))
        if materializes_as_gpu:
            stack.enter_context(replace_attribute(torch._inductor.ir, "is_cpu", lambda _: False))
        # Buffers do not depend on vectorization, and these checks start a C++ compiler for each instruction set.
        stack.enter_context(replace_attribute(cpu_vec_isa, "valid_vec_isa_list", list))
        # Nor do they depend on how loops are split. Inductor 2.13 fails an assertion there for casts of blocks.
        stack.enter_context(replace_attribute(CppScheduling, "try_loop_split", lambda scheduling, nodes: nodes))
        yield


def count_forward_results() -> int | None:
    """Return how many of a traced forward's results are not saved for its backward; they come first.

    None if AOTAutograd traces nothing.
    """
    context = current_tracing_context()
    metadata = None if context is None else context.fw_metadata
    return None if metadata is None else len(metadata.tokens) + metadata.num_forward_returns
