"""Runs Inductor up to its Python wrapper code, without kernels. It is slow to import, so import it inside functions.

The wrapper code is rewritten and executed (wrapper_code.py). PyTorch does not promise its format, and no version is
refused: this was tested with torch 2.11, 2.13 and 2.15. The tests of compiled predictions run with the oldest and the
newest version in CI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quaver.lab.memory.compiling.buffer_origin import BufferOrigin, find_node, find_readers, run_no_kernel
from quaver.lab.memory.compiling.compiled_tracker import find_recording
from quaver.lab.memory.compiling.wrapper_code import LAYOUT_OF, RECEIVED, RETURNED, rewrite
from quaver.runtime.devices import is_cuda_device
from quaver.torch_private.inductor import count_forward_results, disable_caches, list_enabled, replace_code

_REFUSED_SETTINGS = ("cpp_wrapper", "memory_planning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
"""Settings with which Inductor's code is not Python, allocates buffers from pools, or depends on timed kernels."""


@contextmanager
def write_no_kernels() -> Iterator[None]:
    """Let Inductor write code without kernels inside the block, without its caches.

    The code is for a CPU. While a GPU is simulated, it materializes the same results as code for a GPU.

    Raises:
        NotImplementedError: settings or devices that cannot be followed. It is wrapped in Inductor's error.
    """
    is_gpu = is_cuda_device(torch.device("cpu"))
    with disable_caches(), replace_code(_check_graph, _make_module_without_kernels, materializes_as_gpu=is_gpu):
        yield


class _NoCompiler:
    """Replaces Inductor's AsyncCompile, whose methods compile kernels."""

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, language: str) -> Callable[..., Any]:
        return lambda *source, **options: run_no_kernel


def _make_module_without_kernels(graph: Any, wrapper_code: str) -> ModuleType:
    """Make a module of the rewritten wrapper code of a GraphLowering."""
    module = ModuleType("quaver.lab.memory.compiled_code")
    module.__file__ = f"<{graph.graph_id}: no kernels>"
    names = vars(module)
    readers = find_readers(graph)
    names |= {"AsyncCompile": _NoCompiler, LAYOUT_OF: _get_layout, **_make_reporters(graph)}

    def add_origin(buffer: str, operator: str) -> str:
        name = f"origin_{len(names)}"
        names[name] = BufferOrigin(operator, find_node(graph.name_to_buffer.get(buffer)), readers)
        return name

    exec(compile(rewrite(wrapper_code, add_origin), module.__file__, "exec"), names)
    names["reinterpret_tensor"] = _reinterpret
    names |= graph.constants | graph.torchbind_constants | getattr(graph, "opaque_value_type_classes", {})
    return module


def _make_reporters(graph: Any) -> dict[str, Callable[..., Any]]:
    """Make the functions RECEIVED and RETURNED, which report what a forward saves until its backward returns."""
    is_backward = graph.is_backward
    saved_from = None if is_backward or graph.is_inference else count_forward_results()

    def report_received(arguments: list[Any]) -> None:
        if is_backward and (recording := find_recording()):
            recording.tracker.begin_backward(recording.recorder, arguments)

    def report_returned(results: tuple[Any, ...]) -> tuple[Any, ...]:
        recording = find_recording()
        if recording and is_backward:
            recording.tracker.end_backward(recording.recorder)
        elif recording and saved_from is not None:
            recording.tracker.record_saved(recording.recorder, results[saved_from:])
        return results

    return {RECEIVED: report_received, RETURNED: report_returned}


def _check_graph(graph: Any) -> None:
    """Raise NotImplementedError for a GraphLowering that cannot be followed."""
    if refused := list_enabled(_REFUSED_SETTINGS):
        raise NotImplementedError(
            f"expected Inductor's default kernels in Python code, got {' and '.join(refused)}: memory can only be "
            "predicted without"
        )
    if devices := sorted(graph.device_types - {"cpu"}):
        raise NotImplementedError(f"expected compiled code of a CPU, got {' and '.join(devices)}")


def _get_layout(view: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return view.shape, view.stride(), view.dtype


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Return a view of `tensor` with an offset relative to its first element."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
