"""Finds the fastest layouts and recipes of a run whose memory fits.

The memory and the compute time of every layout that the trainer accepts are estimated in closed form. Layouts that fit
are simulated with a few blocks, in the order of their compute time, until no other layout can be among the fastest. The
fastest are simulated with all blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from quaver.lab.plan.changes import with_precision
from quaver.lab.plan.checkpoint_time import predict_checkpoint_seconds_per_step
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.extrapolate import predict_step_seconds, sum_compute_seconds
from quaver.lab.plan.layouts import Candidate, Layouts
from quaver.lab.plan.mfu import check_below_peak
from quaver.lab.plan.peak_memory import estimate_peak
from quaver.lab.plan.planned_run import PlannedRun, make_planned_run
from quaver.lab.plan.simulate import DISK, ExtrapolatedTimeline, SimulatedTimeline, Task, simulate
from quaver.lab.plan.step import ComputeTimes, build_tasks
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.lab.terminal.progress import SetActivity
from quaver.runtime.errors import InputError

USABLE_MEMORY_SHARE = 0.94
"""Share of a GPU's memory that a run may use at its peak. Buffers of CUDA and NCCL, and gaps between blocks, take about
5 GB of 80; torchtitan's runs of Llama 3 8B reserve up to 0.95."""
MAX_SIMULATED_TASKS = 10_000
"""Tasks of a step that are simulated, in 0.1 s on one core; two microbatches of Llama 3 405B have 8,620."""


class EstimatedLayout(NamedTuple):
    """A layout with its estimated memory."""

    candidate: Candidate
    run: PlannedRun
    peak_bytes: int


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout that fits, with its estimated memory and its simulated step."""

    candidate: Candidate
    run: PlannedRun
    peak_bytes: int
    timeline: SimulatedTimeline
    """It has the sums of the whole step, but only the spans of the first microbatches if there are very many tasks."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.timeline.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU."""
        return self.run.step_tokens / self.seconds / self.run.world_size


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    fastest: list[SimulatedLayout]
    """The fastest layouts, the fastest in bfloat16 and the configured one, sorted by speed."""
    fitting_count: int
    """The number of layouts that fit, which were compared."""
    refusals: dict[str, int]
    """The number of layouts that the trainer refuses, by reason."""
    smallest: EstimatedLayout
    """The layout with the least memory."""


@dataclass
class TimedLayout:
    """A layout with its estimated memory, its compute time, and its simulated time, if known."""

    candidate: Candidate
    run: PlannedRun
    compute_times: ComputeTimes
    peak_bytes: int
    compute_seconds_per_token: float
    """A lower bound of the simulated time, which adds communication and the optimizer."""
    _simulated_seconds_per_token: float | None = None

    def simulate_seconds_per_token(self, cluster: Cluster) -> float:
        """Return the simulated time, which is computed once."""
        if self._simulated_seconds_per_token is None:
            self._simulated_seconds_per_token = (
                predict_step_seconds(self.run, cluster, self.compute_times) / self.run.step_tokens
            )
        return self._simulated_seconds_per_token


def search(
    layouts: Layouts,
    cluster: Cluster,
    memory_bytes: int,
    *,
    top: int,
    set_activity: SetActivity = lambda activity: None,
) -> SearchResult:
    """Return the `top` fastest layouts that fit into `memory_bytes`, the fastest in bfloat16, and the configured one.

    Of layouts that differ only in the number of replicas, resharding or the dtype of the all-gather, only the fastest
    is returned.

    Raises:
        InputError: the trainer accepts no layout, or the time of no layout is simulated.
    """
    refusals = layouts.refusals.copy()
    estimated = list(_estimate_peaks(layouts.candidates, refusals, set_activity))
    if not estimated:
        ranks = f"{layouts.candidates[0].dims.world_size} GPUs" if layouts.candidates else "so many GPUs"
        reasons = "; ".join(dict(refusals.most_common(3)))
        raise InputError(f"expected a layout of {ranks} that the trainer accepts; it refuses all: {reasons}")
    smallest = min(estimated, key=lambda estimate: estimate.peak_bytes)
    fitting = [make_timed_layout(*estimate, cluster) for estimate in estimated if estimate.peak_bytes <= memory_bytes]
    bfloat16_layouts = [timed for timed in fitting if timed.candidate.precision_label == BFLOAT16]
    chosen = [
        *(timed for timed in fitting if timed.candidate.is_configured),
        *islice(iter_by_speed(bfloat16_layouts, cluster), 1),
        *islice(_skip_similar(iter_by_speed(fitting, cluster)), top),
    ]
    simulated = []
    for number, timed in enumerate({id(timed): timed for timed in chosen}.values(), 1):
        set_activity(f"simulating step {number}")
        simulated.append(
            SimulatedLayout(timed.candidate, timed.run, timed.peak_bytes, simulate_step(timed.run, cluster))
        )
    simulated.sort(key=lambda layout: -layout.tokens_per_s)
    return SearchResult(simulated, len(fitting), dict(refusals), smallest)


def _estimate_peaks(
    candidates: list[Candidate], refusals: Counter[str], set_activity: SetActivity
) -> Iterator[EstimatedLayout]:
    """Yield candidates with their estimated memory. Candidates whose time is not simulated count as refused."""
    for number, candidate in enumerate(candidates, 1):
        if number % 50 == 0:
            set_activity(f"estimating layout {number} of {len(candidates)}")
        try:
            run = make_planned_run(candidate.config, candidate.dims)
        except InputError as error:
            refusals[str(error)] += 1
            continue
        yield EstimatedLayout(candidate, run, estimate_peak(candidate.config, candidate.dims.world_size))


def make_timed_layout(candidate: Candidate, run: PlannedRun, peak_bytes: int, cluster: Cluster) -> TimedLayout:
    """Return a candidate with its compute time."""
    compute_times = ComputeTimes.from_formulas(run, cluster)
    return TimedLayout(
        candidate, run, compute_times, peak_bytes, sum_compute_seconds(run, compute_times) / run.step_tokens
    )


def iter_by_speed(layouts: Iterable[TimedLayout], cluster: Cluster) -> Iterator[TimedLayout]:
    """Yield layouts, the fastest first. A layout is simulated only when its lower bound is the lowest left."""
    heap = [(timed.compute_seconds_per_token, index, False, timed) for index, timed in enumerate(layouts)]
    heapify(heap)
    while heap:
        _, index, is_simulated, fastest = heappop(heap)
        if is_simulated:
            yield fastest
        else:
            heappush(heap, (fastest.simulate_seconds_per_token(cluster), index, True, fastest))


def _skip_similar(layouts: Iterable[TimedLayout]) -> Iterator[TimedLayout]:
    """Yield the first of layouts that differ only in the number of replicas and in how weights are gathered."""
    seen = set()
    for timed in layouts:
        dims, config = timed.candidate.dims, timed.candidate.config
        dtypes = timed.candidate.precision_label, config.training.residual_stream_dtype, config.optimizer.name
        similarity_key = dims.tp, dims.ep, config.training.local_batch_size, config.activation_checkpoint, *dtypes
        if similarity_key not in seen:
            seen.add(similarity_key)
            yield timed


def simulate_step(run: PlannedRun, cluster: Cluster, compute_times: ComputeTimes | None = None) -> SimulatedTimeline:
    """Return the timeline of a step with its share of a checkpoint, extrapolated if the step has very many tasks.

    Args:
        compute_times: of a microbatch, by default from the formulas of compute_time.py.
    Raises:
        RuntimeError: the step is faster than the GPU's peak allows.
    """
    compute_times = compute_times or ComputeTimes.from_formulas(run, cluster)
    tasks_per_micro_batch = len(build_tasks(replace(run, micro_batches=1), cluster, compute_times))
    simulated_micro_batches = min(run.micro_batches, max(2, MAX_SIMULATED_TASKS // tasks_per_micro_batch))
    timeline = simulate(build_tasks(replace(run, micro_batches=simulated_micro_batches), cluster, compute_times))
    if simulated_micro_batches < run.micro_batches:
        without_last = simulate(
            build_tasks(replace(run, micro_batches=simulated_micro_batches - 1), cluster, compute_times)
        )
        timeline = ExtrapolatedTimeline(timeline.spans, without_last, run.micro_batches - simulated_micro_batches)
    check_below_peak(run, timeline.seconds, cluster.spec)
    checkpoint_s = predict_checkpoint_seconds_per_step(run, cluster, timeline.seconds)
    if not checkpoint_s:
        return timeline
    return timeline.append(Task("its share of a checkpoint", DISK, checkpoint_s, kind="checkpoint"))


def make_bfloat16_run(layout: SimulatedLayout) -> PlannedRun:
    """Return the run of the same layout in bfloat16, even if that does not fit."""
    resolved, dims = resolve_parallel_dims(
        with_precision(layout.candidate.config, BFLOAT16), rank=0, world_size=layout.run.world_size
    )
    return make_planned_run(resolved, dims)
