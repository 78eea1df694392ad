"""The kernels and operators that compiled code launches on a GPU, read from Inductor's scheduler.

Bytes of a fused kernel are Inductor's: each buffer that the kernel reads or writes in memory, once at most. Those of an
operator are the bytes of its arguments and results. quaver/lab/bench/ledger corrects both.
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

from quaver.lab.memory.compiling.makers import module_of_node, node_of, place_of
from quaver.recipes.formats import FORMATS

FLOAT8 = frozenset(FORMATS)


@dataclass(frozen=True)
class Access:
    """A buffer that a launch reads or writes."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    moved_bytes: int

    @property
    def elements(self) -> int:
        """The number of elements of the buffer."""
        return prod(self.size)

    @property
    def is_float8(self) -> bool:
        """Whether it holds codes."""
        return self.dtype in FLOAT8


@dataclass(frozen=True)
class TritonKernel:
    """A kernel that Inductor wrote: its source, and the pointer under which it reads or writes each buffer."""

    name: str
    source: str
    pointers: Mapping[str, str]
    scheduled: int
    """The id of the scheduler's node."""


@dataclass(frozen=True)
class Launch:
    """One scheduled node: a fused kernel of Inductor's, or an operator.

    Attributes:
        operator: its name; empty for a fused kernel.
        kernels: the Triton kernels that the node became, rarely more than one; none for an operator.
        fuses: the operators of the model that it computes.
        place: the source line, and the module, of what it writes first.
        conversions: for each buffer of codes, the operator of the graph that made them.
        is_reduction: whether it reduces anything.
    """

    operator: str
    kernels: tuple[TritonKernel, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    fuses: tuple[str, ...]
    place: str
    conversions: Mapping[str, str]
    is_reduction: bool


@dataclass(frozen=True)
class CompiledGraph:
    """A forward or a backward. `saved` is what a forward saves for backward but parameters and buffers."""

    is_backward: bool
    launches: tuple[Launch, ...]
    saved: tuple[Access, ...]
    source: str


def graph_of(graph: Any, kernels: Sequence[TritonKernel], source: str) -> CompiledGraph:
    """Read a lowered graph whose code was just written, with the kernels written for it."""
    nodes = graph.scheduler.nodes
    results: dict[str, list[Access]] = {}
    for node in nodes:
        if _is_result(node):
            results.setdefault(node.node.inputs[0].get_name(), []).append(_access(node.node))
    conversions = _conversions_read(nodes)
    launches = tuple(
        _operator_launch(node, results)
        if isinstance(node, ExternKernelSchedulerNode)
        else _kernel_launch(node, kernels, conversions)
        for node in nodes
        if not (isinstance(node, NopKernelSchedulerNode) or _is_result(node) or _launches_nothing(node))
    )
    return CompiledGraph(graph.is_backward, launches, _saved(graph), source)


def _is_result(node: Any) -> bool:
    """Whether a scheduled node only takes one result of an operator with several."""
    return isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, ir.MultiOutput)


def _launches_nothing(node: Any) -> bool:
    return isinstance(node, ExternKernelSchedulerNode) and "wait_for" in _operator_name(node.node)


def _kernel_launch(node: Any, kernels: Sequence[TritonKernel], conversions: Mapping[str, str]) -> Launch:
    reads, writes = (
        node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads) for reads in (True, False)
    )
    parts = [part for part in node.get_nodes() if part.node is not None]
    written = {name: moved for name, moved in writes.items() if name not in V.graph.removed_buffers}
    origins = [origin for part in parts for origin in _origins(part.node)]
    return Launch(
        operator="",
        kernels=tuple(kernel for kernel in kernels if kernel.scheduled == id(node)),
        # what a kernel loads of its own results is in a cache: quaver/lab/bench/ledger counts it apart
        reads=tuple(_accesses({name: moved for name, moved in reads.items() if name not in writes})),
        writes=tuple(_accesses(written)),
        fuses=tuple(dict.fromkeys(_name(origin) for origin in origins)),
        place=_place([part.node for part in parts if part.get_name() in written] or [part.node for part in parts]),
        conversions={
            part.node.get_name(): conversions.get(part.node.get_name()) or _conversion(part.node)
            for part in parts
            if _dtype(part.node) in FLOAT8
        },
        is_reduction=any(part.is_reduction() for part in parts),
    )


def _operator_launch(node: Any, results: Mapping[str, list[Access]]) -> Launch:
    operator, name = node.node, node.node.get_name()
    reads = [_access(each) for each in _tensors(operator.inputs)]
    written = results.get(name) or [_access(operator)]
    return Launch(
        operator=_operator_name(operator),
        kernels=(),
        reads=tuple(reads),
        writes=tuple(each for each in written if each.elements),
        fuses=tuple(dict.fromkeys(_name(origin) for origin in _origins(operator))),
        place=_place([operator]),
        conversions={},
        is_reduction=False,
    )


def _tensors(inputs: Sequence[Any]) -> Iterator[Any]:
    for each in inputs:
        if isinstance(each, list | tuple):
            yield from _tensors(each)
        elif _dtype(each) is not None:
            yield each


def _dtype(buffer: Any) -> torch.dtype | None:
    layout = buffer.maybe_get_layout() if hasattr(buffer, "maybe_get_layout") else None
    return getattr(layout, "dtype", None) if hasattr(layout, "size") else None


def _accesses(moved: Mapping[str, int]) -> Iterator[Access]:
    for name, bytes_ in moved.items():  # what `wait_for` seems to have written has another name
        buffer = V.graph.try_get_buffer(V.graph.scheduler.mutation_real_name.get(name, name))
        if buffer is not None and _dtype(buffer) is not None:
            yield _access(buffer, int(bytes_))


def _access(buffer: Any, moved_bytes: int | None = None) -> Access:
    """A buffer, or the part of it that a view shows; by default all of it is moved."""
    if _dtype(buffer) is None:  # an operator with several results, or with none
        return Access(buffer.get_name(), (0,), (1,), torch.uint8, 0)
    layout = buffer.get_layout()
    size, stride = (
        [V.graph.sizevars.optimization_hint(each) for each in part] for part in (layout.size, layout.stride)
    )
    moved = prod(size) * layout.dtype.itemsize if moved_bytes is None else moved_bytes
    return Access(buffer.get_name(), tuple(size), tuple(stride), layout.dtype, moved)


def _origins(buffer: Any) -> list[fx.Node]:
    return [each for each in getattr(buffer, "origins", ()) if each.op == "call_function"]


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("prims.").removesuffix(".default")


def _operator_name(operator: Any) -> str:
    name = getattr(operator, "op_overload", None) or getattr(operator, "python_kernel_name", None) or type(operator)
    return str(name).removeprefix("torch.ops.").removeprefix("extern_kernels.").removesuffix(".default")


def _conversions_read(nodes: Sequence[Any]) -> dict[str, str]:
    """For each buffer of codes that an operator reads, the operator of the graph that converts to them.

    The buffer itself does not tell: one that is stored for an operator has the origins of all of its arguments.
    """
    found: dict[str, str] = {}
    for node in nodes:
        operator: Any = node.node if isinstance(node, ExternKernelSchedulerNode) else None
        origin = None if operator is None else operator.get_origin_node()
        if origin is not None:
            arguments = [each for each in tree_leaves(origin.args) if isinstance(each, fx.Node)]
            for read, argument in zip(_tensors(operator.inputs), arguments, strict=False):
                if _is_float8(argument):
                    found.setdefault(read.get_name(), _converting(argument).name)
    return found


def _converting(codes: fx.Node) -> fx.Node:
    """The conversion to codes, which views and copies may follow; the first of these where none is in the graph."""
    while not str(codes.target).startswith("prims.convert_element_type"):
        before = next((each for each in codes.all_input_nodes if _is_float8(each)), None)
        if before is None:
            break
        codes = before
    return codes


def _conversion(buffer: Any) -> str:
    """The operator of the graph that converts to the codes of a buffer which no operator reads."""
    made = [each for each in _origins(buffer) if _is_float8(each)]
    return _converting(made[0]).name if made else str(buffer.get_name())


def _is_float8(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) in FLOAT8


def _place(buffers: Sequence[Any]) -> str:
    for buffer in buffers:
        node = node_of(buffer)
        file, line = place_of(node)
        if file:
            module = module_of_node(node)
            return f"{Path(file).parent.name}/{Path(file).name}:{line}" + (f" in {module}" if module else "")
    return "unknown"


def _saved(graph: Any) -> tuple[Access, ...]:
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if graph.is_backward or metadata is None:
        return ()
    first = len(metadata.tokens) + metadata.num_forward_returns
    names = list(graph.graph_input_names)
    resident = {names[index] for index in metadata.static_input_indices if index < len(names)}
    saved: dict[str, Access] = {}
    for result in graph.graph_outputs[first:]:
        name = result.get_name() if hasattr(result, "get_name") else None
        buffer = None if name is None or name in resident else V.graph.try_get_buffer(name)
        if buffer is not None and _dtype(buffer) is not None:
            saved[buffer.get_name()] = _access(buffer)
    return tuple(saved.values())
