"""Bytes of one training step, from the allocator: the highest sum, what is alive at a mark, and what lies at the peak.

On a CPU every allocation and release of PyTorch's CPU allocator is read, while it happens, by torch.profiler
(profile_memory). So eager and compiled code, the C++ inside an operator, `resize_` of a storage and a collective's
buffers are all counted, and counted alike, to the byte. Not counted is what does not come from this allocator: small
arrays on the heap inside compiled kernels and C extensions, and the gloo threads' own buffers.

[Note: scratch] What an operation allocates and releases again before it returns is its scratch: the packed operands of
a matmul library, the partial results of an attention kernel, and the widened operands of the exact float8 matmul, which
stands in for one in hardware that widens nothing. It takes real memory, so it is in `peak_bytes`. It is another on
every device, so `tensor_peak_bytes` is the highest sum of all the rest: what a training step has in tensors. Casts and
what autograd holds are never scratch.

On a GPU the peak is torch.cuda.max_memory_allocated, scratch and all, and what is alive is memory_allocated.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "forward is done"

_NO_OPERATION = ("aten::empty", "aten::resize_", "aten::new_empty", "autograd::", "FSDP::")
"""Beginnings of names of ranges that ask for no memory of their own: they only allocate for what is around them."""

_FLOAT8_MATMULS = ("quaver::gemm", "quaver::exact_float8_mm")
_CONVERTERS = frozenset(("aten::to", "aten::_to_copy", "aten::copy_", "aten::empty_strided", "aten::empty_like"))
_ELEMENTWISE = frozenset(
    f"aten::{name}{end}" for name in ("mul", "add", "sub", "div", "sum", "mean") for end in ("", "_")
)
"""Operations that on a CPU convert operands of other dtypes inside of themselves."""


@dataclass
class Block:
    """A piece of memory, and the ranges of the profile that it was allocated in, innermost first."""

    size_bytes: int
    ranges: tuple[str, ...]
    born_ns: int
    returns_ns: float
    """When the operation that asked for it returned."""
    dies_ns: float = math.inf

    @property
    def is_scratch(self) -> bool:
        """See the note."""
        return self.dies_ns <= self.returns_ns

    @property
    def is_of_collective(self) -> bool:
        """Whether a process group may hold it: it is one's own, or FSDP2 made it to send or receive."""
        return any(name.startswith(("c10d::", "gloo:", "FSDP::")) for name in self.ranges)


@dataclass
class Usage:
    """Bytes that a step adds to what was alive before it."""

    peak_bytes: int = 0
    tensor_peak_bytes: int | None = None
    """Without scratch (see the note); None on a GPU, whose allocator does not tell."""
    kept_bytes: int = 0
    """Alive at the mark: what the forward keeps for the backward."""
    at_peak: list[Block] = field(default_factory=list, repr=False)
    """What is alive at the peak, largest first; empty on a GPU."""
    at_mark: list[Block] = field(default_factory=list, repr=False)


class Measured:
    """What `measure_usage` gives to its block: `mark` is to be called once, between forward and backward."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark
        self.usage = Usage()


@contextmanager
def measure_usage(device: torch.device, *, may_leave: bool = False) -> Iterator[Measured]:
    """Measure the block, which runs one step on `device`, and fill in `usage`.

    Args:
        may_leave: the step may leave something in the place of what the last one left, such as the scales of the next
            one; what it replaced, whose release a profile does not show, then counts twice.

    Python's garbage collector stands still meanwhile: a reference cycle that holds tensors shows as what it is.

    Raises:
        RuntimeError: at the exit, if the block did not mark once, or left behind more memory than it found: it is then
            not a step that repeats, and releases of older memory, which a profile does not show, may be missing.
    """
    gc.collect()
    gc.disable()
    try:
        yield from _measure_cuda(device, may_leave) if device.type == "cuda" else _measure_cpu(may_leave)
    finally:
        gc.enable()


def _measure_cuda(device: torch.device, may_leave: bool) -> Iterator[Measured]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept: list[int] = []
    measured = Measured(lambda: kept.append(torch.cuda.memory_allocated(device) - before))
    yield measured
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    _check_one_step(len(kept), 0 if may_leave else torch.cuda.memory_allocated(device) - before)
    measured.usage = Usage(peak, None, kept[0])


def _measure_cpu(may_leave: bool) -> Iterator[Measured]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        measured = Measured(_record_mark)
        yield measured
        gc.collect()
        torch.empty(1)  # an event after all others, with the allocator's last sum
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
    # A gloo thread holds its last buffer until it has other work.
    left = [block for block in _alive(blocks, math.inf) if not block.is_of_collective]
    _check_one_step(len(marks), 0 if may_leave else _sum(left))
    at_peak, at_mark = _alive(blocks, _time_of_peak(blocks)), _alive(blocks, marks[0])
    tensors = [block for block in blocks if not block.is_scratch]
    tensor_peak = _alive(tensors, _time_of_peak(tensors))
    return Usage(_sum(at_peak), _sum(tensor_peak), _sum(at_mark), at_peak, at_mark)


def _sum(blocks: list[Block]) -> int:
    return sum(block.size_bytes for block in blocks)


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _blocks(nodes: list[Any]) -> list[Block]:
    """Every piece of CPU memory that was allocated in the log. What is older is not in it: its release says nothing.

    The threads of collectives may drop a buffer where no profiler looks. The allocator's own sum, which comes with each
    event, then falls by its size without an event; or a new piece has its address.
    """
    blocks: list[Block] = []
    live: dict[int, Block] = {}
    sum_before: int | None = None
    events = [node for node in nodes if node.typed[0] == _EventType.Allocation]
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
            ranges, returns_ns = _surroundings(node)
            block = live[event.ptr] = Block(event.alloc_size, ranges, node.start_time_ns, returns_ns)
            blocks.append(block)
    return blocks


def _release_unseen(live: dict[int, Block], size_bytes: int, now_ns: int) -> None:
    """End one or two buffers of collectives that together have this size; if there are none, what went was older."""
    buffers = [pointer for pointer, block in live.items() if block.is_of_collective]
    for count in (1, 2):
        for chosen in itertools.combinations(buffers, count):
            if sum(live[pointer].size_bytes for pointer in chosen) == size_bytes:
                for pointer in chosen:
                    live.pop(pointer).dies_ns = now_ns
                return


def _surroundings(node: Any) -> tuple[tuple[str, ...], float]:
    """The ranges around an allocation, innermost first, and when the operation that asked for it returned.

    An operation has a namespace in its name, as quaver's own phases have; an autograd node has not. What a float8
    matmul does is all its own, and a conversion of an operand is of the elementwise operation around it; the innermost
    operation counts elsewhere.
    """
    around = []
    while (node := node.parent) is not None:
        around.append(node)
    operations = [each for each in around if "::" in each.name and not each.name.startswith(_NO_OPERATION)]
    matmuls = [each for each in operations if each.name in _FLOAT8_MATMULS]
    asked = (matmuls or _without_conversions(operations))[:1]
    return tuple(each.name for each in around), asked[0].end_time_ns if asked else -math.inf


def _without_conversions(operations: list[Any]) -> list[Any]:
    """From the innermost operation on, or from the elementwise one for which an operand is converted."""
    around = itertools.dropwhile(lambda each: each.name in _CONVERTERS, operations)
    found = list(around)
    return found if found and found[0].name in _ELEMENTWISE else operations


def _time_of_peak(blocks: list[Block]) -> float:
    """The first moment at which most bytes are alive."""
    steps: list[tuple[float, int]] = [(block.born_ns, block.size_bytes) for block in blocks]
    steps += [(block.dies_ns, -block.size_bytes) for block in blocks if block.dies_ns < math.inf]
    live = highest = 0
    when = -math.inf
    for time_ns, size_bytes in sorted(steps):  # of one moment, releases first
        live += size_bytes
        if live > highest:
            highest, when = live, time_ns
    return when


def _alive(blocks: list[Block], time_ns: float) -> list[Block]:
    """What is alive at a moment, largest first."""
    alive = [
        each for each in blocks if each.born_ns <= time_ns and (time_ns < each.dies_ns or each.dies_ns == math.inf)
    ]
    return sorted(alive, key=lambda block: -block.size_bytes)
