"""Measures the bytes of one training step from the allocator: its peak, and what is alive at a mark.

On a CPU torch.profiler (profile_memory) logs every allocation and release of PyTorch's CPU allocator. So eager and
compiled code, the C++ inside an operator, resized storages and buffers of collectives all count, to the byte. Memory
from elsewhere does not: small arrays on the heap in compiled kernels and C extensions, and gloo's own buffers.

[Note: scratch] Scratch is memory that an operation allocates and frees before it returns: the packed operands of a
matmul library, the partial results of an attention kernel, the widened operands of the exact float8 matmul, which
hardware does not widen. It is in `peak_bytes`. It depends on the device, so `tensor_peak_bytes` leaves it out and has
only what a step holds in tensors. Casts and saved tensors are never scratch.

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
from torch.profiler import ProfilerActivity, profile, record_function

from quaver.runtime.devices import is_cuda_device
from quaver.torch_private.profiler import EventType

MARK = "forward is done"

_NO_OPERATION = ("aten::empty", "aten::resize_", "aten::new_empty", "autograd::", "FSDP::")
"""Prefixes of ranges that only allocate for the operation around them."""

_COLLECTIVES = ("c10d::", "gloo:", "FSDP::")
_FLOAT8_MATMULS = ("quaver::gemm", "quaver::exact_float8_mm", "quaver::grouped_mm")
_CONVERTERS = frozenset(("aten::to", "aten::_to_copy", "aten::copy_", "aten::empty_strided", "aten::empty_like"))
_ELEMENTWISE = frozenset(
    f"aten::{name}{end}" for name in ("mul", "add", "sub", "div", "sum", "mean") for end in ("", "_")
)
"""Operations that convert operands of other dtypes internally on a CPU."""


@dataclass
class MemoryBlock:
    """One allocation."""

    size_bytes: int
    born_ns: int
    returns_ns: float
    """When the operation that requested it returned."""
    is_of_collective: bool
    """Whether a process group may hold it: its own buffer, or one that FSDP2 sends or receives."""
    dies_ns: float = math.inf

    @property
    def is_scratch(self) -> bool:
        """[Note: scratch]"""
        return self.dies_ns <= self.returns_ns


@dataclass
class Usage:
    """Bytes that a step adds to those alive before it."""

    peak_bytes: int = 0
    tensor_peak_bytes: int | None = None
    """The peak without scratch; None on a GPU, whose allocator does not report it."""
    saved_bytes: int = 0
    """Alive at the mark: what the forward saved for backward."""


class Measured:
    """The result of `measure_usage`; its block must call `mark` once, between forward and backward."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark
        self.usage = Usage()


@contextmanager
def measure_usage(device: torch.device, *, may_leave: bool = False) -> Iterator[Measured]:
    """Measure the block, which runs one step on `device`, and fill in `usage`.

    Args:
        may_leave: the step may replace older memory, such as the next step's scales. The profiler does not show the
            release of the older memory, so it then counts twice.
    Raises:
        RuntimeError: at the exit, if `mark` was not called once, or the step left memory behind. It is then not a step
            that repeats, and releases of older memory may be missing.
    """
    with no_garbage_collection():
        yield from _measure_cuda(device, may_leave) if is_cuda_device(device) else _measure_cpu(may_leave)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn off Python's garbage collector inside the block, so that a reference cycle that holds tensors shows."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _measure_cuda(device: torch.device, may_leave: bool) -> Iterator[Measured]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    at_mark: list[int] = []
    measured = Measured(lambda: at_mark.append(torch.cuda.memory_allocated(device) - before))
    yield measured
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    _check_one_step(len(at_mark), 0 if may_leave else torch.cuda.memory_allocated(device) - before)
    measured.usage = Usage(peak, None, at_mark[0])


def _measure_cpu(may_leave: bool) -> Iterator[Measured]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        measured = Measured(_record_mark)
        yield measured
        gc.collect()
        torch.empty(1)  # a last event, with the allocator's final sum
    measured.usage = _usage_of(list(_walk(profiler.profiler.kineto_results.experimental_event_tree())), may_leave)


def _record_mark() -> None:
    with record_function(MARK):
        pass


def _check_one_step(marks: int, left_bytes: int) -> None:
    if marks != 1:
        raise RuntimeError(f"expected one mark between forward and backward, got {marks}")
    if left_bytes:
        raise RuntimeError(f"the step left {left_bytes} bytes behind; measure one that repeats, after a warm-up")


# ---- the CPU allocator's log -----------------------------------------------------------------------------------------


def _usage_of(nodes: list[Any], may_leave: bool) -> Usage:
    blocks = _blocks(nodes)
    marks = [node.start_time_ns for node in nodes if node.name == MARK]
    # A gloo thread holds its last buffer until its next work.
    left = [block for block in _alive(blocks, math.inf) if not block.is_of_collective]
    _check_one_step(len(marks), 0 if may_leave else _sum(left))
    tensors = [block for block in blocks if not block.is_scratch]
    return Usage(_peak_bytes(blocks), _peak_bytes(tensors), _sum(_alive(blocks, marks[0])))


def _sum(blocks: list[MemoryBlock]) -> int:
    return sum(block.size_bytes for block in blocks)


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _blocks(nodes: list[Any]) -> list[MemoryBlock]:
    """All CPU allocations of the log; older memory is not in it.

    Threads of collectives may free a buffer without an event. It shows in the allocator's own sum, which each event
    has, or when a new allocation has the same address.
    """
    blocks: list[MemoryBlock] = []
    live: dict[int, MemoryBlock] = {}
    sum_before: int | None = None
    events = [node for node in nodes if node.typed[0] == EventType.Allocation]
    for node in sorted(events, key=lambda node: node.start_time_ns):
        event = node.typed[1]
        if event.device.type != "cpu" or not event.alloc_size:
            continue
        unseen = 0 if sum_before is None else sum_before + event.alloc_size - event.total_allocated
        sum_before = event.total_allocated
        if unseen > 0:
            _release_unseen(live, unseen, node.start_time_ns)
        if event.ptr in live:
            live.pop(event.ptr).dies_ns = node.start_time_ns
        if event.alloc_size > 0:
            block = live[event.ptr] = MemoryBlock(event.alloc_size, node.start_time_ns, *_surroundings(node))
            blocks.append(block)
    return blocks


def _release_unseen(live: dict[int, MemoryBlock], size_bytes: int, now_ns: int) -> None:
    """End one or two buffers of collectives of this total size; if there are none, older memory was freed."""
    buffers = [pointer for pointer, block in live.items() if block.is_of_collective]
    for count in (1, 2):
        for chosen in itertools.combinations(buffers, count):
            if sum(live[pointer].size_bytes for pointer in chosen) == size_bytes:
                for pointer in chosen:
                    live.pop(pointer).dies_ns = now_ns
                return


def _surroundings(node: Any) -> tuple[float, bool]:
    """When the operation that requested an allocation returned, and whether it was inside a collective.

    Operations and quaver's phases have a namespace in their names; autograd nodes have none. The innermost operation
    counts, except that a float8 matmul owns everything inside, and an elementwise operation its operands' conversions.
    """
    around = []
    while (node := node.parent) is not None:
        around.append(node)
    operations = [each for each in around if "::" in each.name and not each.name.startswith(_NO_OPERATION)]
    matmuls = [each for each in operations if each.name in _FLOAT8_MATMULS]
    converting = list(itertools.dropwhile(lambda each: each.name in _CONVERTERS, operations))[:1]
    elementwise = [each for each in converting if each.name in _ELEMENTWISE]
    asked = matmuls or elementwise or operations
    is_of_collective = any(each.name.startswith(_COLLECTIVES) for each in around)
    return asked[0].end_time_ns if asked else -math.inf, is_of_collective


def _peak_bytes(blocks: list[MemoryBlock]) -> int:
    """The most bytes alive at any moment."""
    steps: list[tuple[float, int]] = [(block.born_ns, block.size_bytes) for block in blocks]
    steps += [(block.dies_ns, -block.size_bytes) for block in blocks]
    sums = itertools.accumulate(size_bytes for _, size_bytes in sorted(steps))  # releases first at equal times
    return max(sums, default=0)


def _alive(blocks: list[MemoryBlock], time_ns: float) -> list[MemoryBlock]:
    """The allocations alive at a moment."""
    return [each for each in blocks if each.born_ns <= time_ns and (time_ns < each.dies_ns or each.dies_ns == math.inf)]
