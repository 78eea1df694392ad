"""Runs Inductor up to its Python wrapper code, without kernels. It is slow to import, so import it inside functions.

The wrapper code is rewritten and executed (wrapper_code.py). PyTorch does not promise its format, and no version is
refused: this was tested with torch 2.11, 2.13 and 2.15. The tests of compiled predictions run with the oldest and the
newest version in CI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch._inductor.ir
from torch import Tensor
from torch._guards import TracingContext
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.graph import GraphLowering

from quaver.lab.memory.compiling.makers import Maker, find_node, find_readers, get_follower, kernel
from quaver.lab.memory.compiling.wrapper_code import LAYOUT_OF, RECEIVED, RETURNED, rewrite
from quaver.runtime.devices import is_cuda_device

_INDUCTOR = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,  # starts no worker processes
}
_FUNCTORCH = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
_DYNAMO = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
_REFUSED = ("cpp_wrapper", "memory_planning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
"""Settings with which Inductor's code is not Python, allocates buffers from pools, or depends on timed kernels."""


@contextmanager
def disable_caches() -> Iterator[None]:
    """Turn off the caches of Dynamo, AOTAutograd and Inductor inside the block."""
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(_INDUCTOR))
        stack.enter_context(torch._functorch.config.patch(_FUNCTORCH))
        stack.enter_context(torch._dynamo.config.patch(_DYNAMO))
        yield


@contextmanager
def write_no_kernels() -> Iterator[None]:
    """Let Inductor write code without kernels inside the block, without its caches.

    The code is for a CPU. While a GPU is simulated, it materializes the same results as code for a GPU.

    Raises:
        NotImplementedError: settings or devices that cannot be followed. It is wrapped in Inductor's error.
    """
    with ExitStack() as stack:
        stack.enter_context(disable_caches())
        stack.enter_context(patch.object(GraphLowering, "run", _wrap_run(GraphLowering.run)))
        if is_cuda_device(
            torch.device("cpu")
        ):  # Inductor's `is_cpu` decides which results are materialized and which are inlined
            stack.enter_context(patch.object(torch._inductor.ir, "is_cpu", lambda _: False))
        stack.enter_context(patch.object(GraphLowering, "_compile_to_module_lines", _make_module_without_kernels))
        # Buffers do not depend on vectorization, and these checks start a C++ compiler for each instruction set.
        stack.enter_context(patch.object(cpu_vec_isa, "valid_vec_isa_list", list))
        # Nor do they depend on how loops are split. Inductor 2.13 fails an assertion there for casts of blocks.
        stack.enter_context(patch.object(CppScheduling, "try_loop_split", lambda scheduling, nodes: nodes))
        yield


class _NoCompiler:
    """Replaces Inductor's AsyncCompile, whose methods compile kernels."""

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, language: str) -> Callable[..., Any]:
        return lambda *source, **options: kernel


def _make_module_without_kernels(graph: Any, wrapper_code: Any) -> ModuleType:
    """Replace `GraphLowering._compile_to_module_lines`: make a module of the rewritten wrapper code."""
    module = ModuleType("quaver.lab.memory.compiled_code")
    module.__file__ = f"<{graph.graph_id}: no kernels>"
    names = vars(module)
    readers = find_readers(graph)
    names |= {"AsyncCompile": _NoCompiler, LAYOUT_OF: _get_layout, **_make_reporters(graph)}

    def add_maker(buffer: str, operator: str) -> str:
        name = f"maker_{len(names)}"
        names[name] = Maker(operator, find_node(graph.name_to_buffer.get(buffer)), readers)
        return name

    exec(compile(rewrite(wrapper_code.value, add_maker), module.__file__, "exec"), names)
    names["reinterpret_tensor"] = _reinterpret
    names |= graph.constants | graph.torchbind_constants | getattr(graph, "opaque_value_type_classes", {})
    return module


def _make_reporters(graph: Any) -> dict[str, Callable[..., Any]]:
    """Make the functions RECEIVED and RETURNED, which report what a forward saves until its backward returns."""
    context = TracingContext.try_get()
    is_backward, metadata = graph.is_backward, None if context is None else context.fw_metadata
    saved_from: int | None = None
    if metadata is not None and not (is_backward or graph.is_inference):
        saved_from = len(metadata.tokens) + metadata.num_forward_returns

    def report_received(arguments: list[Any]) -> None:
        if is_backward and (rows := get_follower()):
            rows.begin_backward(arguments)

    def report_returned(results: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = get_follower()
        if rows and is_backward:
            rows.end_backward()
        elif rows and saved_from is not None:
            rows.record_saved(results[saved_from:])
        return results

    return {RECEIVED: report_received, RETURNED: report_returned}


def _wrap_run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `GraphLowering.run` with an error for graphs that cannot be followed."""

    def checked_run(graph: Any, *arguments: Any) -> Any:
        refused = [name for name in _REFUSED if getattr(torch._inductor.config, name)]
        if refused:
            raise NotImplementedError(
                f"expected Inductor's default kernels in Python code, got {' and '.join(refused)}: memory can only be "
                "predicted without"
            )
        result = run(graph, *arguments)
        devices = sorted(graph.device_types - {"cpu"})
        if devices:
            raise NotImplementedError(f"expected compiled code of a CPU, got {' and '.join(devices)}")
        return result

    return checked_run


def _get_layout(view: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return view.shape, view.stride(), view.dtype


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Return a view of `tensor` with an offset relative to its first element."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
