"""Measures the bytes of one training step from the allocator: its peak, and the bytes alive at a mark.

On a CPU torch.profiler (profile_memory) logs every allocation and release of PyTorch's CPU allocator. So eager and
compiled code, the C++ inside an operator, resized storages and buffers of collectives all count exactly. Memory from
other allocators does not: small arrays on the heap in compiled kernels and C extensions, and gloo's internal buffers.

[Note: scratch] Scratch is memory that an operation allocates and frees before it returns: the packed operands of a
matmul library, the partial results of an attention kernel, the widened operands of the exact float8 matmul.
`peak_bytes` includes it. It depends on the device, so `tensor_peak_bytes` excludes it and counts only tensors. Casts
and saved tensors are never scratch.

On a GPU the peak is torch.cuda.max_memory_allocated, with scratch, and live bytes are memory_allocated.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

from quaver.runtime.devices import is_cuda_device
from quaver.torch_private.profiler import EventType

MARK_NAME = "forward is done"

_ALLOCATING_RANGES = ("aten::empty", "aten::resize_", "aten::new_empty", "autograd::", "FSDP::")
"""Prefixes of ranges that only allocate for the operation around them."""

_COLLECTIVE_PREFIXES = ("c10d::", "gloo:", "FSDP::")
_FLOAT8_MATMULS = ("quaver::gemm", "quaver::exact_float8_mm", "quaver::grouped_mm")
_CONVERTERS = frozenset(("aten::to", "aten::_to_copy", "aten::copy_", "aten::empty_strided", "aten::empty_like"))
_ELEMENTWISE = frozenset(
    f"aten::{name}{end}" for name in ("mul", "add", "sub", "div", "sum", "mean") for end in ("", "_")
)
"""Operations that convert operands of different dtypes internally on a CPU."""


@dataclass
class MemoryBlock:
    """One allocation."""

    size_bytes: int
    allocated_ns: int
    operator_end_ns: float
    """When the operation that requested it returned."""
    is_collective_buffer: bool
    """Whether a process group may hold it: an internal buffer, or one that FSDP2 sends or receives."""
    released_ns: float = math.inf

    @property
    def is_scratch(self) -> bool:
        """See [Note: scratch]."""
        return self.released_ns <= self.operator_end_ns


@dataclass
class Usage:
    """The bytes of a step, without memory that was alive before it."""

    peak_bytes: int = 0
    tensor_peak_bytes: int | None = None
    """The peak without scratch; None on a GPU, whose allocator does not report it."""
    saved_bytes: int = 0
    """The bytes alive at the mark, which the forward saved for backward."""


class MeasuredStep:
    """The result of `measure_usage`; its block must call `mark` once, between forward and backward."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark
        self.usage = Usage()


@contextmanager
def measure_usage(device: torch.device, *, allow_leftover: bool = False) -> Iterator[MeasuredStep]:
    """Measure the block, which runs one step on `device`, and fill in `usage`.

    Args:
        allow_leftover: allow the step to free memory from before it and allocate a replacement, such as the next
            step's scales. The profiler misses the free, so both count.
    Raises:
        RuntimeError: a profiler runs on a CPU; or at the exit, if `mark` was not called exactly once, or if the step
            left memory behind. Such a step does not repeat, and releases of older memory may be missing.
    """
    with pause_garbage_collection():
        yield from _measure_cuda(device, allow_leftover) if is_cuda_device(device) else _measure_cpu(allow_leftover)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Turn off Python's garbage collector inside the block, so that reference cycles keep their tensors alive."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _measure_cuda(device: torch.device, allow_leftover: bool) -> Iterator[MeasuredStep]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    at_mark: list[int] = []
    measured = MeasuredStep(lambda: at_mark.append(torch.cuda.memory_allocated(device) - before))
    yield measured
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    _check_one_step(len(at_mark), 0 if allow_leftover else torch.cuda.memory_allocated(device) - before)
    measured.usage = Usage(peak, None, at_mark[0])


def _measure_cpu(allow_leftover: bool) -> Iterator[MeasuredStep]:
    if profiler._is_profiler_enabled:
        raise RuntimeError("expected no profiler around a measurement on a CPU, which profiles; two cannot run at once")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiling:
        measured = MeasuredStep(_record_mark)
        yield measured
        gc.collect()
        torch.empty(1)  # logs a last event, which has the allocator's final sum
    events = profiling.profiler.kineto_results.experimental_event_tree()
    measured.usage = _compute_usage(list(_iter_nodes(events)), allow_leftover)


def _record_mark() -> None:
    with record_function(MARK_NAME):
        pass


def _check_one_step(mark_count: int, leftover_bytes: int) -> None:
    if mark_count != 1:
        raise RuntimeError(f"expected one mark between forward and backward, got {mark_count}")
    if leftover_bytes:
        raise RuntimeError(f"the step left {leftover_bytes} bytes behind; measure one that repeats, after a warm-up")


def _compute_usage(nodes: list[Any], allow_leftover: bool) -> Usage:
    blocks = _read_blocks(nodes)
    marks = [node.start_time_ns for node in nodes if node.name == MARK_NAME]
    # Buffers of collectives are excluded, since a gloo thread holds its last one until its next work.
    leftover = [block for block in _select_alive(blocks, math.inf) if not block.is_collective_buffer]
    _check_one_step(len(marks), 0 if allow_leftover else _sum_bytes(leftover))
    tensors = [block for block in blocks if not block.is_scratch]
    return Usage(_find_peak_bytes(blocks), _find_peak_bytes(tensors), _sum_bytes(_select_alive(blocks, marks[0])))


def _sum_bytes(blocks: list[MemoryBlock]) -> int:
    return sum(block.size_bytes for block in blocks)


def _iter_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _iter_nodes(node.children)


def _read_blocks(nodes: list[Any]) -> list[MemoryBlock]:
    """Return all CPU allocations in the log, which does not contain older memory.

    Threads of collectives may free a buffer without an event. The release is inferred from the allocator's total, which
    each event has, or from a new allocation at the same address.
    """
    blocks: list[MemoryBlock] = []
    live: dict[int, MemoryBlock] = {}
    total_before: int | None = None
    events = [node for node in nodes if node.typed[0] == EventType.Allocation]
    for node in sorted(events, key=lambda node: node.start_time_ns):
        event = node.typed[1]
        if event.device.type != "cpu" or not event.alloc_size:
            continue
        unseen_bytes = 0 if total_before is None else total_before + event.alloc_size - event.total_allocated
        total_before = event.total_allocated
        if unseen_bytes > 0:
            _release_unseen(live, unseen_bytes, node.start_time_ns)
        if event.ptr in live:
            live.pop(event.ptr).released_ns = node.start_time_ns
        if event.alloc_size > 0:
            block = live[event.ptr] = MemoryBlock(event.alloc_size, node.start_time_ns, *_find_requester(node))
            blocks.append(block)
    return blocks


def _release_unseen(live: dict[int, MemoryBlock], size_bytes: int, now_ns: int) -> None:
    """Release one or two buffers of collectives with this total size. If there are none, older memory was freed."""
    buffers = [pointer for pointer, block in live.items() if block.is_collective_buffer]
    for count in (1, 2):
        for pointers in itertools.combinations(buffers, count):
            if sum(live[pointer].size_bytes for pointer in pointers) == size_bytes:
                for pointer in pointers:
                    live.pop(pointer).released_ns = now_ns
                return


def _find_requester(node: Any) -> tuple[float, bool]:
    """Return when the operation that requested an allocation returned, and whether it was inside a collective.

    Operations and quaver's phases have a namespace in their names, unlike autograd nodes. The requester is the
    innermost operation, except that a float8 matmul owns everything inside, and an elementwise operation the
    conversions of its operands.
    """
    parents = []
    while (node := node.parent) is not None:
        parents.append(node)
    operations = [
        parent for parent in parents if "::" in parent.name and not parent.name.startswith(_ALLOCATING_RANGES)
    ]
    matmuls = [operation for operation in operations if operation.name in _FLOAT8_MATMULS]
    converting = list(itertools.dropwhile(lambda operation: operation.name in _CONVERTERS, operations))[:1]
    elementwise = [operation for operation in converting if operation.name in _ELEMENTWISE]
    requesters = matmuls or elementwise or operations
    is_collective_buffer = any(parent.name.startswith(_COLLECTIVE_PREFIXES) for parent in parents)
    return requesters[0].end_time_ns if requesters else -math.inf, is_collective_buffer


def _find_peak_bytes(blocks: list[MemoryBlock]) -> int:
    changes: list[tuple[float, int]] = [(block.allocated_ns, block.size_bytes) for block in blocks]
    changes += [(block.released_ns, -block.size_bytes) for block in blocks]
    live_bytes = itertools.accumulate(size_bytes for _, size_bytes in sorted(changes))  # releases first at equal times
    return max(live_bytes, default=0)


def _select_alive(blocks: list[MemoryBlock], time_ns: float) -> list[MemoryBlock]:
    allocated = [block for block in blocks if block.allocated_ns <= time_ns]
    return [block for block in allocated if time_ns < block.released_ns or block.released_ns == math.inf]
