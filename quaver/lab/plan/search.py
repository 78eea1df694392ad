"""Finds the fastest layouts and recipes of a run whose memory fits.

The memory of every layout that the trainer accepts is estimated, and what it computes is timed. Those that may fit are
simulated, shallow, from the least time to compute on, as far as one may be among the fastest. From the fastest on,
memory is then predicted to the byte, in a quick search not, until enough of them fit; those are simulated whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice

from quaver.lab.plan.changes import BFLOAT16, with_precision
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.estimate import estimated_peak
from quaver.lab.plan.layouts import Candidate, Layouts
from quaver.lab.plan.memory import Outcome, Peak, peaks_of
from quaver.lab.plan.peak import share_of_peak
from quaver.lab.plan.quick import least_seconds, quick_seconds
from quaver.lab.plan.run import Run, run_of
from quaver.lab.plan.simulate import Timeline, simulate
from quaver.lab.plan.step import Costs, training_step
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import resolve

HOPELESS = 1.15
"""A layout whose estimated memory is so many times the memory of the GPU is not predicted."""
SURE = 0.99
"""A layout among those that differ in replicas and gathers is taken to fit if its estimated memory is below this share
of the GPU's: a predicted peak is at most 1.006 times its estimate (tests/lab/plan/test_estimate.py)."""
MOST_PREDICTED = 12
"""Peaks that are predicted at most in one search."""
_MOST_TASKS = 10_000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A layout that fits, with its predicted memory and its simulated step."""

    candidate: Candidate
    run: Run
    peak: Peak
    seconds: float
    timeline: Timeline
    """The whole step, or its first micro-batches where it has very many tasks."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU."""
        return self.run.step_tokens / self.seconds / self.run.ranks


@dataclass
class Found:
    """The result of a search."""

    rows: list[Row]
    """The fastest first."""
    tried: int
    """Layouts that were compared: those that may fit."""
    refusals: dict[str, int]
    """Why the trainer refuses layouts, and how many."""
    not_predicted: dict[str, int] = field(default_factory=dict)
    """Why the memory of layouts could not be predicted."""
    nearest: tuple[Candidate, int] | None = None
    """If none fits: the layout with the least memory, predicted or estimated, and its bytes."""
    is_cut: bool = False
    """Whether MOST_PREDICTED ended the search."""


def search(
    layouts: Layouts,
    cluster: Cluster,
    memory_bytes: int,
    *,
    top: int,
    quick: bool = False,
    progress: Progress = lambda words: None,
) -> Found:
    """The `top` fastest layouts that fit into `memory_bytes`, the fastest in bfloat16, and the configured one.

    Args:
        quick: take the memory of `estimated_peak` in place of the predicted one.

    Raises:
        ValueError: the time of no layout is modelled.
    """
    if not layouts.candidates:
        raise _all_refused(layouts, layouts.refusals)
    return _Search(layouts, cluster, memory_bytes, top, _estimates_of if quick else peaks_of, progress).found()


@dataclass
class Timed:
    """A layout with its estimated memory, and its time where it was simulated."""

    candidate: Candidate
    run: Run
    costs: Costs
    estimated_bytes: int
    least_seconds_per_token: float
    """The computation alone, without communication."""
    _simulated: float | None = None

    def seconds_per_token(self, cluster: Cluster) -> float:
        """Simulated, once."""
        if self._simulated is None:
            self._simulated = quick_seconds(self.run, cluster, self.costs) / self.run.step_tokens
        return self._simulated


def _by_speed(layouts: Iterable[Timed], cluster: Cluster) -> Iterator[Timed]:
    """Yield the fastest first. A layout is simulated when no other one that is left can be faster than it may be."""
    waiting = [(each.least_seconds_per_token, number, False, each) for number, each in enumerate(layouts)]
    heapify(waiting)
    while waiting:
        _, number, is_simulated, fastest = heappop(waiting)
        if is_simulated:
            yield fastest
        else:
            heappush(waiting, (fastest.seconds_per_token(cluster), number, True, fastest))


class _Search:
    """Simulates candidates, and predicts the memory of some until the fastest that fit are known."""

    def __init__(
        self,
        layouts: Layouts,
        cluster: Cluster,
        memory_bytes: int,
        top: int,
        peaks_of: Callable[[Iterator[TrainConfig], int], Generator[Outcome, None, None]],
        progress: Progress,
    ) -> None:
        self._layouts, self._cluster, self._memory_bytes = layouts, cluster, memory_bytes
        self._top, self._peaks_of, self._progress = top, peaks_of, progress
        self._refusals = layouts.refusals.copy()
        self._least: tuple[Candidate, int] | None = None
        """The layout with the least estimated memory."""
        self._hopeful = 0
        """Layouts that may fit."""
        self._order: list[Timed] = []
        """Whose memory is predicted, in this order; one ahead."""
        self._promised = MOST_PREDICTED
        """How many of them are, whatever the others have."""
        self._rows: list[Row] = []
        self._not_predicted: Counter[str] = Counter()

    def found(self) -> Found:
        """Predict in the order of `_configs`, until no layout that follows can be one of the rows."""
        nearest: tuple[Candidate, int] | None = None
        predicted = 0
        with closing(self._peaks_of(self._configs(), self._layouts.candidates[0].layout.world_size)) as peaks:
            for predicted, peak in enumerate(peaks, 1):
                timed = self._order[predicted - 1]
                if not isinstance(peak, Peak):
                    self._not_predicted[peak.reason] += 1
                elif peak.bytes <= self._memory_bytes:
                    self._add(timed, peak)
                elif nearest is None or peak.bytes < nearest[1]:
                    nearest = timed.candidate, peak.bytes
                self._progress(f"predicted the memory of {predicted} layouts, {len(self._rows)} fit")
                if self._promised <= predicted < len(self._order) and self._has_enough(self._order[predicted]):
                    break
        self._rows.sort(key=lambda row: -row.tokens_per_s)
        if nearest is None or (self._least is not None and self._least[1] < nearest[1]):
            nearest = self._least
        is_cut = len(self._order) == predicted == MOST_PREDICTED < self._hopeful
        refusals, unpredicted = dict(self._refusals), dict(self._not_predicted)
        return Found(self._rows, self._hopeful, refusals, unpredicted, None if self._rows else nearest, is_cut)

    def _configs(self) -> Iterator[TrainConfig]:
        """Yield the configs of `_order`; that of the configured layout before the others are looked at."""
        candidates = self._layouts.candidates
        self._order = list(self._timed(each for each in candidates if each.is_configured))
        yield from (each.candidate.config for each in self._order)
        others = list(self._timed(each for each in candidates if not each.is_configured))
        if self._least is None:
            raise _all_refused(self._layouts, self._refusals)
        before: Timed | None = None
        for each in self._ordered(others):
            self._order.append(each)
            if before is not None:
                yield before.candidate.config
            before = each
        if before is not None:
            yield before.candidate.config

    def _ordered(self, others: Sequence[Timed]) -> Iterator[Timed]:
        """Yield the fastest in bfloat16 that probably fits, then the others by their speed, without the configured one.

        Of layouts that only differ in replicas and gathers the fastest comes whose estimate surely fits, and no other.
        """
        surely, configured = self._memory_bytes * SURE, list(self._order)
        hopeful = [*configured, *others]
        sure = {_alike(each.candidate) for each in hopeful if each.estimated_bytes <= surely}

        def unlike(layouts: Iterable[Timed]) -> Iterator[Timed]:
            seen = set()
            for number, each in enumerate(_by_speed(layouts, self._cluster), 1):
                self._progress(f"ordered {number} of {len(hopeful)} layouts by speed")
                group = _alike(each.candidate)
                if group not in seen and (each.estimated_bytes <= surely or group not in sure):
                    seen.add(group)
                    yield each

        in_bfloat16 = (each for each in hopeful if each.candidate.precision == BFLOAT16)
        fits = (each for each in unlike(in_bfloat16) if each.estimated_bytes <= self._memory_bytes)
        firsts = {each.candidate.config: each for each in [*configured, *islice(fits, 1)]}
        self._promised = len(firsts)
        yield from [*firsts.values()][len(configured) :]
        rest = (each for each in unlike(hopeful) if each.candidate.config not in firsts)
        yield from islice(rest, MOST_PREDICTED - len(firsts))

    def _timed(self, candidates: Iterable[Candidate]) -> Iterator[Timed]:
        """Yield those that may fit, with their estimated memory; the configured one always."""
        number = len(self._layouts.candidates)
        for at, candidate in enumerate(candidates, 1):
            if at % 50 == 0:
                self._progress(f"estimating layout {at} of {number}")
            try:
                run = run_of(candidate.config, candidate.layout)
            except ValueError as error:
                self._refusals[str(error)] += 1
                continue
            estimate = estimated_peak(candidate.config, candidate.layout.world_size)
            if self._least is None or estimate < self._least[1]:
                self._least = candidate, estimate
            if estimate <= self._memory_bytes * HOPELESS or candidate.is_configured:
                self._hopeful += 1
                costs = Costs.of(run, self._cluster)
                least = least_seconds(run, costs) / run.step_tokens
                yield Timed(candidate, run, costs, estimate, least)

    def _add(self, timed: Timed, peak: Peak) -> None:
        is_known = any(_alike(row.candidate) == _alike(timed.candidate) for row in self._rows)
        if not is_known or timed.candidate.is_configured:
            self._rows.append(row_of(timed.candidate, timed.run, peak, self._cluster))

    def _has_enough(self, following: Timed) -> bool:
        """Whether `top` rows are at least as fast as the fastest layout that is not predicted yet."""
        slowest = following.seconds_per_token(self._cluster) * (1 + 1e-9)
        return sum(row.seconds / row.run.step_tokens <= slowest for row in self._rows) >= self._top


def _estimates_of(configs: Iterator[TrainConfig], ranks: int) -> Generator[Outcome, None, None]:
    """Estimates in place of predictions."""
    yield from (Peak(estimated_peak(config, ranks), {}, "", "", why_whole="estimated") for config in configs)


def _alike(candidate: Candidate) -> tuple[object, ...]:
    """The settings that tell layouts apart, but for how many replicas share the weights, and how they are gathered."""
    layout, config = candidate.layout, candidate.config
    storage = config.activation_checkpoint, config.optimizer.name, config.training.residual_stream_dtype
    return layout.tensor, layout.expert, config.training.local_batch_size, candidate.precision, *storage


def row_of(candidate: Candidate, run: Run, peak: Peak, cluster: Cluster) -> Row:
    """The row of a layout with its step simulated."""
    return Row(candidate, run, peak, *simulated(run, cluster))


def simulated(run: Run, cluster: Cluster, costs: Costs | None = None) -> tuple[float, Timeline]:
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


def in_bfloat16(row: Row, cluster: Cluster) -> float:
    """The seconds of the same layout in bfloat16, whether it fits or not."""
    if row.candidate.precision == BFLOAT16:
        return row.seconds
    config = with_precision(row.candidate.config, BFLOAT16)
    resolved, layout = resolve(config, rank=0, world_size=row.run.ranks)
    return quick_seconds(run_of(resolved, layout), cluster)


def _all_refused(layouts: Layouts, refusals: Counter[str]) -> ValueError:
    ranks = f"{layouts.candidates[0].layout.world_size} GPUs" if layouts.candidates else "so many GPUs"
    reasons = "; ".join(dict(refusals.most_common(3)))
    return ValueError(f"expected a layout of {ranks} that the trainer accepts; it refuses all: {reasons}")
