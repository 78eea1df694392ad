"""Simulates tasks on streams: each stream runs one task at a time, in the order in which they were added.

A task begins when its stream is free and the tasks that it waits for have ended, as CUDA's streams and events do. While
a collective runs on a link, its kernels hold multiprocessors, and the compute stream is slower by CONTENTION.
Deterministic; the time of a simulation is linear in its tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

COMPUTE = "compute"
CONTENTION = 0.12
"""Of the multiprocessors, those that a collective holds: NCCL's rings take 16 to 24 of 132 on Hopper, a block for each
channel; DeepSeek-V3 gives 20 of 132 to communication (arXiv 2412.19437, section 3.2.2)."""
_WITHOUT_KERNELS = (COMPUTE, "send")
_TINY = 1e-15


@dataclass(frozen=True)
class Task:
    """Work of one stream; `after` are the numbers of tasks that end before it begins."""

    name: str
    stream: str
    """compute, or a link; "@3" after it for that of the fourth rank, where several are simulated."""
    seconds: float
    after: tuple[int, ...] = ()
    kind: str = ""
    """What it belongs to, for sums: forward, backward, all_gather, ..."""


@dataclass(frozen=True)
class Span:
    """A task as it ran."""

    task: Task
    start_s: float
    end_s: float


@dataclass
class Step:
    """The tasks of a step, in the order in which a rank issues them."""

    tasks: list[Task] = field(default_factory=list)

    def add(self, name: str, stream: str, seconds: float, after: Iterable[int | None] = (), kind: str = "") -> int:
        """Issue a task; returns its number. None in `after` is no task."""
        waits = tuple(sorted({each for each in after if each is not None}))
        self.tasks.append(Task(name, stream, seconds, waits, kind))
        return len(self.tasks) - 1

    def last_of(self, stream: str) -> int | None:
        """The number of the last task of a stream; None without one."""
        return next((i for i in reversed(range(len(self.tasks))) if self.tasks[i].stream == stream), None)


@dataclass(frozen=True)
class Timeline:
    """The spans of a step, in the order of its tasks."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, stream: str) -> float:
        """How long a stream works."""
        return sum(span.end_s - span.start_s for span in self.spans if span.task.stream == stream)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams, the compute stream first."""
        return tuple(dict.fromkeys((COMPUTE, *(span.task.stream for span in self.spans))))

    def exposed_s(self, kind: str) -> float:
        """How long tasks of a kind run while the compute stream does nothing."""
        return self._outside_of_compute(span for span in self.spans if span.task.kind == kind)

    def exposed_on(self, stream: str) -> float:
        """How long a stream works while the compute stream does nothing."""
        return self._outside_of_compute(span for span in self.spans if span.task.stream == stream)

    def _outside_of_compute(self, spans: Iterable[Span]) -> float:
        busy = _merged((s.start_s, s.end_s) for s in self.spans if s.task.stream == COMPUTE)
        total, number = 0.0, 0
        for start, end in _merged((s.start_s, s.end_s) for s in spans):
            total += end - start
            while number < len(busy) and busy[number][1] <= start:
                number += 1
            for begin, finish in busy[number:]:
                if begin >= end:
                    break
                total -= min(end, finish) - max(start, begin)
        return total


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def simulate(step: Step, contention: float = CONTENTION) -> Timeline:
    """Run the tasks of a step.

    Raises:
        ValueError: a task waits for one that can never begin before it.
    """
    tasks = step.tasks
    queues: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    heads = dict.fromkeys(queues, 0)
    start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
    running: dict[str, float] = {}  # stream -> seconds of work left
    now = 0.0
    while True:
        for stream, queue in queues.items():
            if stream not in running and heads[stream] < len(queue):
                number = queue[heads[stream]]
                if all(end[each] >= 0 for each in tasks[number].after):
                    running[stream], start[number] = tasks[number].seconds, now
        if not running:
            break
        shared = {_rank(stream) for stream in running if not stream.startswith(_WITHOUT_KERNELS)}
        rates = {s: 1 - contention if s.startswith(COMPUTE) and _rank(s) in shared else 1.0 for s in running}
        passed = min(left / rates[stream] for stream, left in running.items())
        now += passed
        for stream in list(running):
            running[stream] -= passed * rates[stream]
            if running[stream] <= _TINY:
                del running[stream]
                end[queues[stream][heads[stream]]] = now
                heads[stream] += 1
    if any(heads[stream] < len(queue) for stream, queue in queues.items()):
        stuck = next(tasks[queue[heads[stream]]].name for stream, queue in queues.items() if heads[stream] < len(queue))
        raise ValueError(f"expected tasks that wait for earlier ones, got {stuck!r}, which can never begin")
    return Timeline(tuple(Span(task, start[i], end[i]) for i, task in enumerate(tasks)))


def _rank(stream: str) -> str:
    return stream.partition("@")[2]
