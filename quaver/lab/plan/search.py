"""Finds the fastest layouts and recipes of a run whose memory fits.

The memory of every layout that the trainer accepts is estimated in closed form, and what it computes is timed. Those
that fit are simulated, shallow, from the least time to compute on, as far as one may be among the fastest; the fastest
are simulated whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice

from quaver.lab.plan.changes import BFLOAT16, with_precision
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.estimate import estimated_peak
from quaver.lab.plan.layouts import Candidate, Layouts
from quaver.lab.plan.peak import share_of_peak
from quaver.lab.plan.quick import least_seconds, quick_seconds
from quaver.lab.plan.run import PlannedRun, run_of
from quaver.lab.plan.simulate import SimulatedTimeline, simulate
from quaver.lab.plan.step import Costs, training_step
from quaver.lab.settings.parallel_dims import resolve

_MOST_TASKS = 10_000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits, with its estimated memory and its simulated step."""

    candidate: Candidate
    run: PlannedRun
    peak_bytes: int
    seconds: float
    timeline: SimulatedTimeline
    """The whole step, or its first micro-batches where it has very many tasks."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU."""
        return self.run.step_tokens / self.seconds / self.run.ranks


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    rows: list[FittingLayout]
    """The fastest first."""
    tried: int
    """Layouts that were compared: those that fit."""
    refusals: dict[str, int]
    """Why the trainer refuses layouts, and how many."""
    nearest: tuple[Candidate, int]
    """The layout with the least memory, and its bytes."""


@dataclass
class Timed:
    """A layout with its estimated memory, and its time where it was simulated."""

    candidate: Candidate
    run: PlannedRun
    costs: Costs
    peak_bytes: int
    least_seconds_per_token: float
    """The computation alone, without communication."""
    _simulated: float | None = None

    def seconds_per_token(self, cluster: Cluster) -> float:
        """Simulated, once."""
        if self._simulated is None:
            self._simulated = quick_seconds(self.run, cluster, self.costs) / self.run.step_tokens
        return self._simulated


def search(
    layouts: Layouts,
    cluster: Cluster,
    memory_bytes: int,
    *,
    top: int,
    progress: Progress = lambda words: None,
) -> SearchResult:
    """The `top` fastest layouts that fit into `memory_bytes`, the fastest in bfloat16, and the configured one.

    Of layouts that only differ in replicas and gathers, the fastest is a row.

    Raises:
        ValueError: the trainer accepts no layout, or the time of none is modelled.
    """
    refusals = layouts.refusals.copy()
    estimated = list(_estimated(layouts.candidates, refusals, progress))
    if not estimated:
        ranks = f"{layouts.candidates[0].layout.world_size} GPUs" if layouts.candidates else "so many GPUs"
        reasons = "; ".join(dict(refusals.most_common(3)))
        raise ValueError(f"expected a layout of {ranks} that the trainer accepts; it refuses all: {reasons}")
    candidate, _, needed = min(estimated, key=lambda each: each[2])
    fitting = [timed(*each, cluster) for each in estimated if each[2] <= memory_bytes]
    in_bfloat16 = [each for each in fitting if each.candidate.precision == BFLOAT16]
    chosen = [
        *(each for each in fitting if each.candidate.is_configured),
        *islice(by_speed(in_bfloat16, cluster), 1),
        *islice(_unlike(by_speed(fitting, cluster)), top),
    ]
    rows = []
    for number, each in enumerate({id(each): each for each in chosen}.values(), 1):
        progress(f"simulating step {number}")
        rows.append(FittingLayout(each.candidate, each.run, each.peak_bytes, *simulated(each.run, cluster)))
    rows.sort(key=lambda row: -row.tokens_per_s)
    return SearchResult(rows, len(fitting), dict(refusals), (candidate, needed))


def _estimated(
    candidates: list[Candidate], refusals: Counter[str], progress: Progress
) -> Iterator[tuple[Candidate, PlannedRun, int]]:
    """Yield candidates with their estimated memory; those whose time is not modelled are counted as refused."""
    for number, candidate in enumerate(candidates, 1):
        if number % 50 == 0:
            progress(f"estimating layout {number} of {len(candidates)}")
        try:
            run = run_of(candidate.config, candidate.layout)
        except ValueError as error:
            refusals[str(error)] += 1
            continue
        yield candidate, run, estimated_peak(candidate.config, candidate.layout.world_size)


def timed(candidate: Candidate, run: PlannedRun, peak_bytes: int, cluster: Cluster) -> Timed:
    """A candidate with what it computes, timed."""
    costs = Costs.of(run, cluster)
    return Timed(candidate, run, costs, peak_bytes, least_seconds(run, costs) / run.step_tokens)


def by_speed(layouts: Iterable[Timed], cluster: Cluster) -> Iterator[Timed]:
    """Yield the fastest first. A layout is simulated when no other one that is left can be faster than it may be."""
    waiting = [(each.least_seconds_per_token, number, False, each) for number, each in enumerate(layouts)]
    heapify(waiting)
    while waiting:
        _, number, is_simulated, fastest = heappop(waiting)
        if is_simulated:
            yield fastest
        else:
            heappush(waiting, (fastest.seconds_per_token(cluster), number, True, fastest))


def _unlike(layouts: Iterable[Timed]) -> Iterator[Timed]:
    """Yield the first of those that differ only in how many replicas share the weights, and how they are gathered."""
    seen = set()
    for each in layouts:
        layout, config = each.candidate.layout, each.candidate.config
        storage = config.activation_checkpoint, config.optimizer.name, config.training.residual_stream_dtype
        group = layout.tensor, layout.expert, config.training.local_batch_size, each.candidate.precision, *storage
        if group not in seen:
            seen.add(group)
            yield each


def simulated(run: PlannedRun, cluster: Cluster, costs: Costs | None = None) -> tuple[float, SimulatedTimeline]:
    """The seconds of a step, and its timeline: the whole one, or its first micro-batches where it has very many tasks.

    Args:
        costs: of a micro-batch; modelled by default.
    Raises:
        RuntimeError: it is faster than the GPU's peak allows.
    """
    costs = costs or Costs.of(run, cluster)
    tasks_of_one = len(training_step(replace(run, micro_batches=1), cluster, costs).tasks)
    few = min(run.micro_batches, max(2, _MOST_TASKS // tasks_of_one))
    timeline = simulate(training_step(replace(run, micro_batches=few), cluster, costs))
    seconds = timeline.seconds
    if few < run.micro_batches:
        fewer = simulate(training_step(replace(run, micro_batches=few - 1), cluster, costs)).seconds
        seconds += (run.micro_batches - few) * (seconds - fewer)
    share_of_peak(run, seconds, cluster.spec)
    return seconds, timeline


def in_bfloat16(row: FittingLayout, cluster: Cluster) -> float:
    """The seconds of the same layout in bfloat16, whether it fits or not."""
    if row.candidate.precision == BFLOAT16:
        return row.seconds
    config = with_precision(row.candidate.config, BFLOAT16)
    resolved, layout = resolve(config, rank=0, world_size=row.run.ranks)
    return quick_seconds(run_of(resolved, layout), cluster)
