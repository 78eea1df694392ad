"""Attributes the buffers of compiled code to the operators, modules and source lines in Inductor's graph.

Each allocation and call in the rewritten wrapper code (wrapper_code.py) goes through a `BufferOrigin`. It reports a
buffer under the name of the kernel that writes it, calls operators from a frame at the model's source line, and reports
the module to the recorder. Fused kernels do nothing.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.compiling.compiled_tracker import find_recording
from quaver.lab.recorder.callers import NOT_MODEL_CODE
from quaver.lab.recorder.recorder import CAST_PREFIX
from quaver.lab.recorder.storages import StorageTracker
from quaver.runtime.phases import phase
from quaver.torch_private.dispatch import HigherOrderOperator, OpOverload, dispatch_modes, without_dispatch_modes
from quaver.torch_private.tracing import FakeTensorMode

_TRACE_LINE = re.compile(r'File "(.+)", line (\d+), in ')
_PATH_STEP = re.compile(r"(?:\._modules)?\[['\"]?([^\]'\"]+)['\"]?\]")
_PATH_ROOT = re.compile(
    r"L\['\w+'\](?:\.__self__)?"
)  # the compiled module, by the name of its forward's first argument
_RNG_STATE_BYTES = torch.get_rng_state().numel()
_CALL_CODE = (lambda function, args, kwargs: function(*args, **kwargs)).__code__


def run_no_kernel(*args: Any) -> None:
    """Do nothing, in place of a fused kernel."""


class BufferOrigin:
    """The kernel or operator that writes one buffer, with its module and source line."""

    is_view, namespace = False, "inductor"  # attributes of an operator, for `StorageTracker.on_operator_called`

    def __init__(self, operator: str, node: fx.Node | None, readers: Mapping[str, fx.Node]) -> None:
        """Take `readers`, the first operator that reads each tensor, by the tensor's name."""
        result = _name_operator(node)
        self.operator = f"{operator} ({result})" if operator and result else operator or result or "compiled code"
        """A name such as "fused_abs_amax (aten.abs)": the operators fused into the kernel, and the operator whose
        result the buffer is. Or a single operator, or "compiled code" if none is known."""
        self.module = find_module_path(node)
        """The operator's module, relative to the compiled module. Empty for the compiled module, or if unknown."""
        self._in_line = _make_frame(node)
        self._kernel, self._readers = operator, readers
        self._reader_origins: dict[str, BufferOrigin] = {}

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an operator, or report the call of a kernel."""
        with _enter_module(self.module):
            if function is run_no_kernel:
                return self._in_line(_report_call, (self, args), {})
            if isinstance(function, HigherOrderOperator):
                return self._in_line(_call_without_rng, (function, *args), kwargs)
            if isinstance(function, OpOverload) and str(function).startswith(CAST_PREFIX):  # the phase of eager code
                return phase("quaver::cast")(lambda *args: self._in_line(function, args, kwargs))(*args)
            return self._in_line(function, args, kwargs)

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, reads: Mapping[str, Any]
    ) -> Tensor:
        """Allocate a buffer on the CPU, which the kernel computes from `reads`."""
        with _enter_module(self.module):
            tensor: Tensor = self._in_line(_allocate, (size, stride, dtype), {})
        for name, read in reads.items():
            reader = self._get_reader(name)
            with _enter_module(reader.module):
                reader._in_line(_report_call, (reader, (read,)), {})
        with _enter_module(self.module):
            self._in_line(_report_buffer, (self, tensor, tuple(reads.values())), {})
        return tensor

    def _get_reader(self, name: str) -> BufferOrigin:
        """Return the first reader of a tensor, which is cached, since all blocks of a model run the same code."""
        if name not in self._readers:
            return self
        if name not in self._reader_origins:
            self._reader_origins[name] = BufferOrigin(self._kernel, self._readers[name], {})
        return self._reader_origins[name]

    def __str__(self) -> str:
        return self.operator


def _enter_module(module: str) -> AbstractContextManager[None]:
    recording = find_recording()
    return nullcontext() if recording is None else recording.tracker.enter_module(module)


def _report_call(origin: BufferOrigin, args: tuple[Any, ...]) -> None:
    with _keep_only_fakes() as trackers:
        for tracker in trackers:
            tracker.on_operator_called(origin, _list_tensors(args))


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    with _keep_only_fakes():
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _report_buffer(origin: BufferOrigin, tensor: Tensor, reads: Sequence[Any]) -> None:
    with _keep_only_fakes() as trackers:
        for tracker in trackers:
            tracker.on_operator_called(origin, _list_tensors(reads))
            tracker.follow(tensor, origin.operator)


@contextmanager
def _keep_only_fakes() -> Iterator[list[StorageTracker]]:
    """Turn off all dispatch modes except FakeTensorMode inside the block. Yields the StorageTrackers among them."""
    modes = dispatch_modes()
    fake_mode = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    with without_dispatch_modes(), fake_mode or nullcontext():
        yield [mode for mode in modes if isinstance(mode, StorageTracker)]


def _list_tensors(values: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _call_without_rng(function: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    """Call an operator that Inductor wraps to save or restore the RNG state for a recomputation.

    Raises:
        NotImplementedError: another higher-order operator.
    """
    if function is torch.ops.higher_order.run_and_save_rng_state:
        return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8), args[0](*args[1:], **kwargs)
    if function is torch.ops.higher_order.run_with_rng_state:
        return args[1](*args[2:], **kwargs)
    raise NotImplementedError(
        f"expected compiled code of operators, got a call of {function}; its memory can only be predicted without it"
    )


def find_node(buffer: Any) -> fx.Node | None:
    """Return the operator whose result a buffer is, or one of the fused operators; None if unknown."""
    if buffer is None:
        return None
    node = buffer.get_origin_node()
    if node is None:
        node = next((origin for origin in buffer.get_origins() if origin.op == "call_function"), None)
    return node


def find_readers(graph: Any) -> dict[str, fx.Node]:
    """Return the first operator that reads each tensor, by the tensor's name. A kernel may have many operators."""
    readers: dict[str, fx.Node] = {}
    for scheduled in graph.scheduler.nodes:
        for part in scheduled.get_nodes():
            node = find_node(part.node)
            if node is not None:
                for read in part.read_writes.reads:
                    readers.setdefault(read.name, node)
    return readers


def _name_operator(node: fx.Node | None) -> str:
    return "" if node is None else str(node.target).removesuffix(".default")


def find_module_path(node: fx.Node | None) -> str:
    """Return the module of an operator, relative to the compiled module.

    Empty for the compiled module, or if unknown.
    """
    meta = {} if node is None else node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    root = _PATH_ROOT.match(path)
    return _PATH_STEP.sub(r".\1", path[root.end() :]).strip(".") if root else ""


def find_source_line(node: fx.Node | None) -> tuple[str, int]:
    """Return the file and number of the operator's innermost source line in the model; ("", 0) if unknown."""
    trace = "" if node is None else node.meta.get("stack_trace") or ""
    for file, line in reversed(_TRACE_LINE.findall(trace)):
        if not _find_python_module(file).startswith(NOT_MODEL_CODE):
            return file, int(line)
    return "", 0


def _make_frame(node: fx.Node | None) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    file, line = find_source_line(node)
    if not file:
        return FunctionType(_CALL_CODE, {"__name__": __name__, "__builtins__": builtins})
    code = _CALL_CODE.replace(co_filename=file, co_firstlineno=line, co_name="compiled")
    return FunctionType(code, {"__name__": _find_python_module(file), "__builtins__": builtins})


@cache
def _find_python_module(file: str) -> str:
    names = (name for name, module in tuple(sys.modules.items()) if getattr(module, "__file__", None) == file)
    return next(names, "__main__")
