"""Simulates tasks on streams. A stream runs one task at a time, in the order in which they were added.

A task begins when its stream is free and the tasks for which it waits have ended, as with CUDA's streams and events.
While a collective runs on a link, its kernels occupy multiprocessors, which slows its rank's compute stream by
CONTENTION_SHARE. The simulation is deterministic; n tasks take n log n steps.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from quaver.lab.plan.cluster import NETWORK, NVLINK

COMPUTE, DISK = "compute", "disk"
CONTENTION_SHARE = 0.12
"""Share of the multiprocessors that a collective occupies. NCCL's rings take 16 to 24 of 132 on Hopper, one per
channel; DeepSeek-V3 gives 20 of 132 to communication (arXiv 2412.19437, section 3.2.2)."""


@dataclass(frozen=True)
class Task:
    """Work on one stream."""

    name: str
    stream: str
    """COMPUTE, DISK, or a link. Collectives run on NVLINK and NETWORK, a pipeline's sends on links of their own."""
    seconds: float
    dependencies: tuple[int, ...] = ()
    """The ids of the tasks that must end before this one begins."""
    kind: str = ""
    """The kind by which times are summed: forward, backward, all_gather, ..."""
    sent_bytes: float = 0.0
    """Bytes that the rank sends."""
    rank: int = 0
    """The rank that runs the task; others than 0 only if several are simulated."""


@dataclass(frozen=True)
class Span:
    """A task with its start and end."""

    task: Task
    start_s: float
    end_s: float


Dependencies = Iterable[int | None]
"""Ids of tasks. None is ignored."""


class TaskList(list[Task]):
    """The tasks of a step, in the order in which a rank issues them. A task's id is its index."""

    def add(
        self,
        name: str,
        stream: str,
        seconds: float,
        dependencies: Dependencies = (),
        kind: str = "",
        sent_bytes: float = 0.0,
    ) -> int:
        """Issue a task and return its id."""
        task_ids = tuple(sorted({task_id for task_id in dependencies if task_id is not None}))
        self.append(Task(name, stream, seconds, task_ids, kind, sent_bytes))
        return len(self) - 1

    def find_last(self, stream: str) -> int | None:
        """Return the id of the last task on a stream, or None if it has no task."""
        return next((i for i in reversed(range(len(self))) if self[i].stream == stream), None)


@dataclass(frozen=True)
class SimulatedTimeline:
    """The spans of a step, in the order of its tasks. Sums are over all simulated ranks."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The end of the last task."""
        return self._last_end_s

    @property
    def _last_end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the tasks, in the order of their first task."""
        return tuple(dict.fromkeys(span.task.kind for span in self.spans))

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams, the compute stream first."""
        return tuple(dict.fromkeys((COMPUTE, *(span.task.stream for span in self.spans))))

    def append(self, task: Task) -> Self:
        """Return the timeline of the step with `task` after its last one."""
        return replace(self, spans=(*self.spans, Span(task, self._last_end_s, self._last_end_s + task.seconds)))

    def sum_seconds(self, *, stream: str | None = None, kind: str | None = None) -> float:
        """Return the summed times of the tasks on `stream` and of `kind`; None selects all."""
        return sum(span.end_s - span.start_s for span in self._select_spans(stream, kind))

    def sum_sent_bytes(self, link: str) -> float:
        """Return the bytes that the rank sends over a link."""
        return sum(span.task.sent_bytes for span in self._select_spans(link, None))

    def sum_exposed_seconds(self, *, stream: str | None = None, kind: str | None = None) -> float:
        """Return the time in which tasks on `stream` and of `kind` run while the compute stream is idle."""
        busy = _merge_intervals(self._select_spans(COMPUTE, None))
        total, first = 0.0, 0
        for start, end in _merge_intervals(self._select_spans(stream, kind)):
            total += end - start
            while first < len(busy) and busy[first][1] <= start:
                first += 1
            index = first
            while index < len(busy) and busy[index][0] < end:
                total -= min(end, busy[index][1]) - max(start, busy[index][0])
                index += 1
        return total

    def _select_spans(self, stream: str | None, kind: str | None) -> Iterator[Span]:
        return (span for span in self.spans if stream in (None, span.task.stream) and kind in (None, span.task.kind))


@dataclass(frozen=True)
class ExtrapolatedTimeline(SimulatedTimeline):
    """The spans of a step's first microbatches. Sums of seconds and bytes are for the whole step.

    Each of the `further_micro_batches` adds what the last simulated one adds to `without_last`, the step without it.
    """

    without_last: SimulatedTimeline
    further_micro_batches: int

    @property
    def seconds(self) -> float:
        return self._extrapolate(super().seconds, self.without_last.seconds)

    def append(self, task: Task) -> Self:
        return replace(super().append(task), without_last=self.without_last.append(task))

    def sum_seconds(self, **selected: str | None) -> float:
        return self._extrapolate(super().sum_seconds(**selected), self.without_last.sum_seconds(**selected))

    def sum_sent_bytes(self, link: str) -> float:
        return self._extrapolate(super().sum_sent_bytes(link), self.without_last.sum_sent_bytes(link))

    def sum_exposed_seconds(self, **selected: str | None) -> float:
        return self._extrapolate(
            super().sum_exposed_seconds(**selected), self.without_last.sum_exposed_seconds(**selected)
        )

    def _extrapolate(self, value: float, value_without_last: float) -> float:
        return value + self.further_micro_batches * (value - value_without_last)


def _merge_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the (start, end) of the intervals that `spans` cover, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def simulate(tasks: Sequence[Task], contention: float = CONTENTION_SHARE) -> SimulatedTimeline:
    """Run the tasks of a step.

    Raises:
        ValueError: tasks wait for each other.
    """
    simulation = _Simulation(tasks, contention)
    simulation.run()
    spans = map(Span, tasks, simulation.starts_s, simulation.ends_s)
    return SimulatedTimeline(tuple(spans))


class _RunningTask:
    """A running task: `left_s` seconds of work at the time `since_s`, and the rate at which they pass."""

    def __init__(self, task_id: int, left_s: float, since_s: float, rate: float) -> None:
        self.task_id, self.left_s, self.since_s, self.rate = task_id, left_s, since_s, rate

    def change_rate(self, rate: float, now_s: float) -> None:
        self.left_s = max(0.0, self.left_s - (now_s - self.since_s) * self.rate)
        self.since_s, self.rate = now_s, rate

    @property
    def end_s(self) -> float:
        return self.since_s + self.left_s / self.rate


class _RankStream(NamedTuple):
    """A stream of one rank, with a queue of its own."""

    rank: int
    stream: str


class _Simulation:
    def __init__(self, tasks: Sequence[Task], contention: float) -> None:
        self._tasks, self._shared_rate = tasks, 1 - contention
        self.starts_s, self.ends_s = [0.0] * len(tasks), [0.0] * len(tasks)
        self._queues: dict[_RankStream, deque[int]] = {}
        self._dependents: list[list[int]] = [[] for _ in tasks]
        self._unfinished = [len(set(task.dependencies)) for task in tasks]
        """The number of unfinished dependencies of each task."""
        self._streams = [_RankStream(task.rank, task.stream) for task in tasks]
        for task_id, task in enumerate(tasks):
            self._queues.setdefault(self._streams[task_id], deque()).append(task_id)
            for dependency in set(task.dependencies):
                self._dependents[dependency].append(task_id)
        self._running: dict[_RankStream, _RunningTask] = {}
        self._collectives: Counter[int] = Counter()
        """The number of running collectives, by rank."""
        self._events: list[tuple[float, int]] = []
        """(end, task id) of running tasks. A task whose rate changed has several events; the last is valid."""

    def run(self) -> None:
        """Run until no task can begin."""
        for stream in self._queues:
            self._begin(stream, 0.0)
        while self._events:
            now_s, task_id = heapq.heappop(self._events)
            stream = self._streams[task_id]
            running = self._running.get(stream)
            if running is None or running.task_id != task_id or running.end_s != now_s:
                continue
            del self._running[stream]
            self.ends_s[task_id] = now_s
            self._queues[stream].popleft()
            self._count_collective(stream, -1, now_s)
            dependents = self._dependents[task_id]
            for dependent in dependents:
                self._unfinished[dependent] -= 1
            for freed in dict.fromkeys((stream, *(self._streams[dependent] for dependent in dependents))):
                self._begin(freed, now_s)
        stuck = next((queue[0] for queue in self._queues.values() if queue), None)
        if stuck is not None:
            name = self._tasks[stuck].name
            raise ValueError(f"expected tasks that wait for earlier ones, got {name!r}, which can never begin")

    def _begin(self, stream: _RankStream, now_s: float) -> None:
        """Begin the stream's next task, if the stream is free and the task need not wait."""
        queue = self._queues[stream]
        if stream in self._running or not queue or self._unfinished[queue[0]]:
            return
        task_id = queue[0]
        is_slow = stream.stream == COMPUTE and self._collectives[stream.rank] > 0
        rate = self._shared_rate if is_slow else 1.0
        self.starts_s[task_id] = now_s
        self._running[stream] = _RunningTask(task_id, self._tasks[task_id].seconds, now_s, rate)
        self._push_end(stream)
        self._count_collective(stream, 1, now_s)

    def _count_collective(self, stream: _RankStream, change: int, now_s: float) -> None:
        """Count a collective that began or ended. The first and the last change the rate of the rank's compute."""
        if stream.stream not in (NVLINK, NETWORK):
            return
        before = self._collectives[stream.rank]
        self._collectives[stream.rank] += change
        compute = _RankStream(stream.rank, COMPUTE)
        if (before == 0) != (before + change == 0) and compute in self._running:
            self._running[compute].change_rate(self._shared_rate if change > 0 else 1.0, now_s)
            self._push_end(compute)

    def _push_end(self, stream: _RankStream) -> None:
        running = self._running[stream]
        heapq.heappush(self._events, (running.end_s, running.task_id))
