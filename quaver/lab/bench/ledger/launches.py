"""The kernels and operators that compiled code launches on a GPU, read from Inductor's scheduler.

The bytes of a fused kernel are Inductor's estimate: each buffer that the kernel reads or writes in memory counts once.
The bytes of an operator are its arguments and results. quaver/lab/bench/ledger corrects both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import ir
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.compiling.buffer_origin import find_module_path, find_node, find_source_line
from quaver.recipes.formats import FLOAT8_FORMATS

FLOAT8_DTYPES = frozenset(FLOAT8_FORMATS)


@dataclass(frozen=True)
class BufferAccess:
    """A buffer that a launch reads or writes."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    moved_bytes: int

    @property
    def elements(self) -> int:
        return prod(self.size)

    @property
    def is_float8(self) -> bool:
        return self.dtype in FLOAT8_DTYPES


@dataclass(frozen=True)
class TritonKernel:
    """A kernel that Inductor wrote."""

    name: str
    source: str
    pointers: Mapping[str, str]
    """The name of the kernel's pointer argument for each buffer."""
    scheduled: int
    """The id of the scheduler's node."""


@dataclass(frozen=True)
class Launch:
    """One scheduled node: one of Inductor's fused kernels, or an operator."""

    operator: str
    """The name of the operator; empty for a fused kernel."""
    kernels: tuple[TritonKernel, ...]
    """The Triton kernels of the node, rarely more than one; none for an operator."""
    reads: tuple[BufferAccess, ...]
    writes: tuple[BufferAccess, ...]
    fuses: tuple[str, ...]
    """The operators of the model that the node computes."""
    location: str
    """The source line and the module of the first buffer that it writes."""
    conversions: Mapping[str, str]
    """The operator in the graph that converts to the codes of each buffer of codes."""
    is_reduction: bool


@dataclass(frozen=True)
class CompiledGraph:
    """The compiled code of a forward or a backward."""

    is_backward: bool
    launches: tuple[Launch, ...]
    saved: tuple[BufferAccess, ...]
    """Tensors that a forward saves for backward, without parameters and buffers."""
    source: str


def read_graph(graph: Any, kernels: Sequence[TritonKernel], source: str) -> CompiledGraph:
    """Read a lowered graph, after Inductor wrote its code and `kernels`."""
    nodes = graph.scheduler.nodes
    results: dict[str, list[BufferAccess]] = {}
    for node in nodes:
        if _is_result(node):
            results.setdefault(node.node.inputs[0].get_name(), []).append(_make_access(node.node))
    conversions = _find_conversions_for_operators(nodes)
    launches = tuple(
        _make_operator_launch(node, results)
        if isinstance(node, ExternKernelSchedulerNode)
        else _make_kernel_launch(node, kernels, conversions)
        for node in nodes
        if not (isinstance(node, NopKernelSchedulerNode) or _is_result(node) or _launches_nothing(node))
    )
    return CompiledGraph(graph.is_backward, launches, _list_saved(graph), source)


def _is_result(node: Any) -> bool:
    """Return whether a scheduled node only selects one result of an operator with several."""
    return isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, ir.MultiOutput)


def _launches_nothing(node: Any) -> bool:
    return isinstance(node, ExternKernelSchedulerNode) and "wait_for" in _name_operator(node.node)


def _make_kernel_launch(node: Any, kernels: Sequence[TritonKernel], conversions: Mapping[str, str]) -> Launch:
    reads, writes = (
        node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads) for reads in (True, False)
    )
    parts = [part for part in node.get_nodes() if part.node is not None]
    written = {name: moved for name, moved in writes.items() if name not in V.graph.removed_buffers}
    written_parts = [part for part in parts if part.get_name() in written]
    origins = [origin for part in parts for origin in _list_origins(part.node)]
    return Launch(
        operator="",
        kernels=tuple(kernel for kernel in kernels if kernel.scheduled == id(node)),
        # A kernel loads its own results from a cache, which quaver/lab/bench/ledger counts separately.
        reads=tuple(_iter_accesses({name: moved for name, moved in reads.items() if name not in writes})),
        writes=tuple(_iter_accesses(written)),
        fuses=tuple(dict.fromkeys(_shorten_name(origin) for origin in origins)),
        location=_describe_location([part.node for part in written_parts or parts]),
        conversions={
            part.node.get_name(): conversions.get(part.node.get_name()) or _find_conversion_in_kernel(part.node)
            for part in parts
            if _get_dtype(part.node) in FLOAT8_DTYPES
        },
        is_reduction=any(part.is_reduction() for part in parts),
    )


def _make_operator_launch(node: Any, results: Mapping[str, list[BufferAccess]]) -> Launch:
    operator, name = node.node, node.node.get_name()
    reads = [_make_access(buffer) for buffer in _iter_buffers(operator.inputs)]
    written = results.get(name) or [_make_access(operator)]
    return Launch(
        operator=_name_operator(operator),
        kernels=(),
        reads=tuple(reads),
        writes=tuple(access for access in written if access.elements),
        fuses=tuple(dict.fromkeys(_shorten_name(origin) for origin in _list_origins(operator))),
        location=_describe_location([operator]),
        conversions={},
        is_reduction=False,
    )


def _iter_buffers(inputs: Sequence[Any]) -> Iterator[Any]:
    for value in inputs:
        if isinstance(value, list | tuple):
            yield from _iter_buffers(value)
        elif _get_dtype(value) is not None:
            yield value


def _get_dtype(buffer: Any) -> torch.dtype | None:
    layout = buffer.maybe_get_layout() if hasattr(buffer, "maybe_get_layout") else None
    return getattr(layout, "dtype", None) if hasattr(layout, "size") else None


def _iter_accesses(moved: Mapping[str, int]) -> Iterator[BufferAccess]:
    for name, bytes_ in moved.items():  # `wait_for` seems to mutate its argument, under another name
        buffer = V.graph.try_get_buffer(V.graph.scheduler.mutation_real_name.get(name, name))
        if buffer is not None and _get_dtype(buffer) is not None:
            yield _make_access(buffer, int(bytes_))


def _make_access(buffer: Any, moved_bytes: int | None = None) -> BufferAccess:
    """Return the access of a buffer, or of a view of one. By default all its bytes are moved."""
    if _get_dtype(buffer) is None:  # an operator with several results, or without results
        return BufferAccess(buffer.get_name(), (0,), (1,), torch.uint8, 0)
    layout = buffer.get_layout()
    hint = V.graph.sizevars.optimization_hint
    size, stride = ([hint(extent) for extent in extents] for extents in (layout.size, layout.stride))
    moved = prod(size) * layout.dtype.itemsize if moved_bytes is None else moved_bytes
    return BufferAccess(buffer.get_name(), tuple(size), tuple(stride), layout.dtype, moved)


def _list_origins(buffer: Any) -> list[fx.Node]:
    return [origin for origin in getattr(buffer, "origins", ()) if origin.op == "call_function"]


def _shorten_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("prims.").removesuffix(".default")


def _name_operator(operator: Any) -> str:
    name = getattr(operator, "op_overload", None) or getattr(operator, "python_kernel_name", None) or type(operator)
    return str(name).removeprefix("torch.ops.").removeprefix("extern_kernels.").removesuffix(".default")


def _find_conversions_for_operators(nodes: Sequence[Any]) -> dict[str, str]:
    """Return the operator in the graph that converts to the codes of each buffer that an operator reads.

    The origins of the buffer are ambiguous: if it is stored for an operator, they include all of its arguments.
    """
    conversions: dict[str, str] = {}
    for node in nodes:
        operator: Any = node.node if isinstance(node, ExternKernelSchedulerNode) else None
        origin = None if operator is None else operator.get_origin_node()
        if origin is not None:
            arguments = [leaf for leaf in tree_leaves(origin.args) if isinstance(leaf, fx.Node)]
            for read, argument in zip(_iter_buffers(operator.inputs), arguments, strict=False):
                if _is_float8(argument):
                    conversions.setdefault(read.get_name(), _find_conversion(argument).name)
    return conversions


def _find_conversion(codes: fx.Node) -> fx.Node:
    """Follow views and copies of `codes` back to the node that converts to float8, or else to their first node."""
    while not str(codes.target).startswith("prims.convert_element_type"):
        source = next((node for node in codes.all_input_nodes if _is_float8(node)), None)
        if source is None:
            break
        codes = source
    return codes


def _find_conversion_in_kernel(buffer: Any) -> str:
    codes = [origin for origin in _list_origins(buffer) if _is_float8(origin)]
    return _find_conversion(codes[0]).name if codes else str(buffer.get_name())


def _is_float8(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in FLOAT8_DTYPES


def _describe_location(buffers: Sequence[Any]) -> str:
    for buffer in buffers:
        node = find_node(buffer)
        file, line = find_source_line(node)
        if file:
            module = find_module_path(node)
            return f"{Path(file).parent.name}/{Path(file).name}:{line}" + (f" in {module}" if module else "")
    return "unknown"


def _list_saved(graph: Any) -> tuple[BufferAccess, ...]:
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if graph.is_backward or metadata is None:
        return ()
    first = len(metadata.tokens) + metadata.num_forward_returns
    names = list(graph.graph_input_names)
    resident = {names[index] for index in metadata.static_input_indices if index < len(names)}
    saved: dict[str, BufferAccess] = {}
    for result in graph.graph_outputs[first:]:
        name = result.get_name() if hasattr(result, "get_name") else None
        buffer = None if name is None or name in resident else V.graph.try_get_buffer(name)
        if buffer is not None and _get_dtype(buffer) is not None:
            saved[buffer.get_name()] = _make_access(buffer)
    return tuple(saved.values())
