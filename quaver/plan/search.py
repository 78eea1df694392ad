"""Finds the fastest layouts and recipes of a run whose memory fits.

Every layout that the trainer accepts is simulated, shallow, and its memory is estimated. From the fastest on, memory is
then predicted to the byte, until enough of them fit; those are simulated whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quaver.plan.changes import BFLOAT16, with_precision
from quaver.plan.cluster import Cluster
from quaver.plan.estimate import estimated_peak
from quaver.plan.layouts import Candidate, Layouts
from quaver.plan.memory import Peak, peaks_of
from quaver.plan.quick import quick_seconds
from quaver.plan.run import Run, run_of
from quaver.plan.simulate import Timeline, simulate
from quaver.plan.step import Costs, training_step
from quaver.settings import TrainConfig
from quaver.settings.parallel_dims import resolve

HOPELESS = 1.15
"""A layout whose estimated memory is so many times the memory of the GPU is not predicted."""
SURE = 0.99
"""A layout among those that differ in replicas and gathers is taken to fit if its estimated memory is below this share
of the GPU's: a predicted peak is at most 1.006 times its estimate (tests/unit/plan/test_estimate.py)."""
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
    """Layouts that were simulated."""
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
    progress: Progress = lambda words: None,
) -> Found:
    """The `top` fastest layouts that fit into `memory_bytes`, the fastest in bfloat16, and the configured one.

    Raises:
        ValueError: the time of no layout is modelled.
    """
    if not layouts.candidates:
        raise _all_refused(layouts, layouts.refusals)
    return _Search(layouts, cluster, memory_bytes, top, progress).found()


class Timed(NamedTuple):
    """A layout with its simulated time and estimated memory."""

    seconds_per_token: float
    """Infinite for one whose memory is hopeless."""
    estimated_bytes: int
    candidate: Candidate
    run: Run

    @property
    def is_hopeful(self) -> bool:
        """Whether its memory may fit."""
        return self.seconds_per_token < float("inf")


class _Search:
    """Simulates all candidates, and predicts the memory of some until the fastest that fit are known."""

    def __init__(self, layouts: Layouts, cluster: Cluster, memory_bytes: int, top: int, progress: Progress) -> None:
        self._layouts, self._cluster, self._memory_bytes = layouts, cluster, memory_bytes
        self._top, self._progress = top, progress
        self._refusals = layouts.refusals.copy()
        self._timed: list[Timed] = []
        self._order: list[Timed] = []
        """Whose memory is predicted, in this order."""
        self._promised = 0
        """How many of them are, whatever the others have."""
        self._rows: list[Row] = []
        self._not_predicted: Counter[str] = Counter()

    def found(self) -> Found:
        """Predict in the order of `_configs`, until no layout that follows can be one of the rows."""
        nearest: tuple[Candidate, int] | None = None
        predicted = 0
        with closing(peaks_of(self._configs(), self._layouts.candidates[0].layout.world_size)) as peaks:
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
        least = min(self._timed, key=lambda each: each.estimated_bytes)
        if nearest is None or least.estimated_bytes < nearest[1]:
            nearest = least.candidate, least.estimated_bytes
        tried = sum(each.is_hopeful for each in self._timed)
        is_cut = len(self._order) == predicted == MOST_PREDICTED < tried
        refusals, unpredicted = dict(self._refusals), dict(self._not_predicted)
        return Found(self._rows, tried, refusals, unpredicted, None if self._rows else nearest, is_cut)

    def _configs(self) -> Iterator[TrainConfig]:
        """Yield the configs of `_order`; that of the configured layout before the others are simulated."""
        candidates = self._layouts.candidates
        self._simulate([each for each in candidates if each.is_configured])
        self._order = list(self._timed)
        yield from (each.candidate.config for each in self._order)
        self._simulate([each for each in candidates if not each.is_configured])
        if not self._timed:
            raise _all_refused(self._layouts, self._refusals)
        self._timed.sort(key=lambda each: each.seconds_per_token)
        ordered, self._promised = self._ordered([each for each in self._timed if each.is_hopeful])
        following = [each for each in ordered if not each.candidate.is_configured]
        self._order += following
        yield from (each.candidate.config for each in following)

    def _simulate(self, candidates: Sequence[Candidate]) -> None:
        for number, candidate in enumerate(candidates):
            if number % 50 == 0 and not candidate.is_configured:
                self._progress(f"simulating layout {number + 1} of {len(candidates)}")
            try:
                run = run_of(candidate.config, candidate.layout)
            except ValueError as error:
                self._refusals[str(error)] += 1
                continue
            estimate = estimated_peak(candidate.config, candidate.layout.world_size)
            is_hopeless = estimate > self._memory_bytes * HOPELESS and not candidate.is_configured
            seconds = float("inf") if is_hopeless else quick_seconds(run, self._cluster) / run.step_tokens
            self._timed.append(Timed(seconds, estimate, candidate, run))

    def _ordered(self, hopeful: list[Timed]) -> tuple[list[Timed], int]:
        """The configured layout and the fastest in bfloat16, whose number is returned too, then the others.

        Of layouts that only differ in replicas and gathers the fastest comes whose estimate surely fits, and no other.
        """
        surely = self._memory_bytes * SURE
        unlike: dict[tuple[object, ...], Timed] = {}
        for each in hopeful:
            known = unlike.setdefault(_alike(each.candidate), each)
            if known.estimated_bytes > surely >= each.estimated_bytes:
                unlike[_alike(each.candidate)] = each
        by_speed = sorted(unlike.values(), key=lambda each: each.seconds_per_token)
        likely = [each for each in by_speed if each.estimated_bytes <= self._memory_bytes]
        firsts = [each for each in hopeful if each.candidate.is_configured]
        firsts += [each for each in likely if each.candidate.precision == BFLOAT16][:1]
        firsts = list({each.candidate.config: each for each in firsts}.values())
        first_configs = {each.candidate.config for each in firsts}
        others = [each for each in by_speed if each.candidate.config not in first_configs]
        return [*firsts, *others][:MOST_PREDICTED], len(firsts)

    def _add(self, timed: Timed, peak: Peak) -> None:
        is_known = any(_alike(row.candidate) == _alike(timed.candidate) for row in self._rows)
        if not is_known or timed.candidate.is_configured:
            self._rows.append(row_of(timed.candidate, timed.run, peak, self._cluster))

    def _has_enough(self, following: Timed) -> bool:
        """Whether `top` rows are at least as fast as the fastest layout that is not predicted yet."""
        slowest = following.seconds_per_token * (1 + 1e-9)
        return sum(row.seconds / row.run.step_tokens <= slowest for row in self._rows) >= self._top


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
    """
    costs = costs or Costs.of(run, cluster)
    tasks_of_one = len(training_step(replace(run, micro_batches=1), cluster, costs).tasks)
    few = max(1, min(run.micro_batches, _MOST_TASKS // tasks_of_one))
    timeline = simulate(training_step(replace(run, micro_batches=few), cluster, costs))
    seconds = timeline.seconds
    if few < run.micro_batches:
        fewer = simulate(training_step(replace(run, micro_batches=few - 1 or 1), cluster, costs)).seconds
        seconds += (run.micro_batches - few) * (seconds - fewer)
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
