"""Predicts the peak of a run under other settings, and their cost in recomputed FLOPs and simulated time.

    advice = advise(config, 8, fit_bytes=80 * 1024**3, time_on="H100")
    advice.rows[advice.fastest_index].flags

Each setting is predicted for the whole model, compiled if the run is; equal blocks compile once. With `fit_bytes`,
combinations follow, the fastest first, until one fits. Simulated times (step_cost.py) that are nearly equal count as
equal; then the setting with fewer changes wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial

from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.plan.calibration import describe_sustained_share
from quaver.lab.plan.changes import (
    Change,
    format_flags,
    iter_with_less_precise_storage,
    list_combinations,
    list_single_changes,
    with_fewest_gathered_weights,
)
from quaver.lab.plan.peak_memory import ESTIMATE_ERROR, estimate_peak
from quaver.lab.plan.step_cost import StepCost, compute_step_cost
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.progress import SetActivity
from quaver.roofline.device_specs import DeviceSpec, find_machine_spec, require_device_spec
from quaver.runtime.errors import InputError

AS_CONFIGURED = "as configured"
EQUAL_TIME_RATIO = 1.02
"""Simulated times with a smaller ratio count as equal: the simulation is no more accurate."""
NEARLY_FITTING_RATIO = 1.1
"""A setting whose peak is at most this many times `fit_bytes` is also tried with fewer gathered weights: the embedding,
and half of the bytes of two blocks. In Llama 3 70B that saves 4.2 + 1.7 GB, 7% of 80."""
EQUAL_SAVING_RATIO = 1.1
"""Less precise storage is tried for a setting that exceeds `fit_bytes` by at most this factor times the bytes that it
saves in the configured run: other settings save nearly as much."""
MAX_COMBINATIONS = 60
"""The largest number of combinations that are predicted, each in up to 2 minutes. Variants with less precise storage do
not count."""
TIMES_NOTE = "times are simulated: what a rank computes and sends, on nodes of 8 GPUs with 400 Gb/s each (docs/plan.md)"

LESS_PRECISE_NOTE = (
    "a bfloat16 residual stream, optimizer states and saved activations in float8 change a run's numbers. They are "
    "tried, in this order, only if no equally fast setting fits without them"
)


@dataclass(frozen=True)
class AdvisedSetting:
    """One setting of the run."""

    change: str
    flags: str
    """The flags that apply it to the configured run."""
    peak_bytes: int | None
    """None if the trainer or the prediction refuses the setting; `note` has the error."""
    difference_bytes: int | None
    """The peak minus the configured run's peak."""
    cost: StepCost | None
    note: str
    fits: bool | None
    """None without `fit_bytes`, or without a peak."""

    def to_dict(self) -> dict[str, object]:
        """Return a dict for JSON, with the fields of `cost` in its place."""
        costs = dict.fromkeys(field.name for field in fields(StepCost)) if self.cost is None else vars(self.cost)
        return {name: value for name, value in vars(self).items() if name != "cost"} | costs


@dataclass(frozen=True)
class Advice:
    """The settings that were tried, the configured one first."""

    rows: list[AdvisedSetting]
    fit_bytes: int | None
    fastest_index: int | None
    """The row of the fastest setting that fits; None if none does, or without `fit_bytes`."""
    smallest_index: int | None
    """The row with the lowest peak, if none fits."""
    device: str | None
    """The GPU for which times are simulated; None if no times are simulated."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return a dict for JSON."""
        return vars(self) | {"rows": [row.to_dict() for row in self.rows]}


def advise(
    config: TrainConfig,
    ranks: int = 1,
    *,
    fit_bytes: int | None = None,
    device: str = "cuda",
    time_on: str | None = None,
    quick: bool = False,
    set_activity: SetActivity | None = None,
) -> Advice:
    """Predict the peak of one rank's memory under other settings of a run.

    Args:
        fit_bytes: find the fastest setting whose peak is at most this.
        device: the kind of device whose memory is predicted, "cuda" or "cpu".
        time_on: the name of a GPU, such as "H100", for which times are simulated. The default is this machine's GPU. If
            that is unknown, it is an H100 with `fit_bytes`; without `fit_bytes` no times are simulated.
        quick: estimate peaks on a GPU in closed form, typically within ESTIMATE_ERROR, instead of predicting them.
        set_activity: called with the name of each setting before its prediction.
    Raises:
        InputError: an unknown GPU, or an error of the run itself.
        NotImplementedError: the configured run cannot be predicted.
    """
    spec = _find_spec(time_on, is_needed=fit_bytes is not None)
    compute_peak = estimate_peak if quick else partial(_predict_peak, device=device)
    search = _AdviceSearch(config, ranks, fit_bytes, spec, compute_peak, set_activity or (lambda activity: None))
    search.notes += [f"peaks are estimated, typically within {ESTIMATE_ERROR:.0%}"] if quick else []
    search.try_single_changes()
    fastest = None if fit_bytes is None else search.find_fastest_fitting(fit_bytes, can_estimate=device == "cuda")
    rows = search.rows
    fastest_bytes = 0 if fastest is None else rows[fastest].peak_bytes or 0
    if quick and fit_bytes and fastest_bytes * (1 + ESTIMATE_ERROR) > fit_bytes:
        search.notes.append(
            f"the estimate of the fastest that fits is within {ESTIMATE_ERROR:.0%} of the limit: predict its peak "
            "without --quick"
        )
    with_peak = [index for index, row in enumerate(rows) if row.peak_bytes is not None]
    smallest = min(with_peak, key=lambda index: rows[index].peak_bytes or 0) if fit_bytes and fastest is None else None
    return Advice(rows, fit_bytes, fastest, smallest, None if spec is None else spec.name, search.notes)


class _AdviceSearch:
    """Tries settings, each at most once."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        fit_bytes: int | None,
        spec: DeviceSpec | None,
        compute_peak: Callable[[TrainConfig, int], int],
        set_activity: SetActivity,
    ) -> None:
        self.rows: list[AdvisedSetting] = []
        self.notes = [TIMES_NOTE, LESS_PRECISE_NOTE]
        self.notes += [f"times on {spec.name}: {describe_sustained_share(spec)}"] if spec is not None else []
        self._compute_peak = compute_peak
        self._config, self._ranks, self._fit_bytes = config, ranks, fit_bytes
        self._spec, self._set_activity = spec, set_activity
        resolved, self._dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
        self._step_batch_size = resolved.training.step_batch_size
        self._row_by_config: dict[TrainConfig, int] = {}
        self._storage_saving_bytes = 0
        # Unlike `_try` this raises: there is nothing else to compare with.
        self._add(AS_CONFIGURED, config, *self._predict(AS_CONFIGURED, config))

    def try_single_changes(self) -> None:
        """Try each single change."""
        for change in list_single_changes(self._config, self._dims, self._step_batch_size):
            self._try(change)
        less_precise = [self._try(change) for change in iter_with_less_precise_storage(Change((), self._config))]
        least = min((self.rows[index].difference_bytes or 0 for index in less_precise), default=0)
        self._storage_saving_bytes = -min(0, least)

    def find_fastest_fitting(self, fit_bytes: int, *, can_estimate: bool) -> int | None:
        """Try combinations, the fastest first, and return the index of the first that fits.

        Args:
            can_estimate: leave out combinations that cannot fit by `estimate_peak`, which is for a GPU.
        """
        changes = [Change((AS_CONFIGURED,), self._config), *list_combinations(self._config, self._step_batch_size)]
        by_config = {change.config: change for change in reversed(changes) if change.config is not None}
        costs = self._compute_costs(by_config)
        if can_estimate:
            smallest = {config: self._estimate_smallest(config, by_config[config]) for config in costs}
            peak_bytes, change = min(smallest.values(), key=lambda estimate: estimate[0])
            if peak_bytes > (1 + ESTIMATE_ERROR) * fit_bytes:
                self.notes.append(f"no combination can fit: the smallest is {change.name}, and no other was predicted")
                self._try(change)
                return None
            costs = {
                config: cost
                for config, cost in costs.items()
                if smallest[config][0] <= (1 + ESTIMATE_ERROR) * fit_bytes
            }
        untimed = sum(cost.simulated_s is None for cost in costs.values())
        if 0 < untimed < len(costs):
            self.notes.append(f"{format_count(untimed, 'combination')} tried last: without a simulated time")
        groups = _sort_by_time([(by_config[config], cost) for config, cost in costs.items()])
        return next((index for index in self._try_groups(groups) if self.rows[index].fits), None)

    def _compute_costs(self, configs: Iterable[TrainConfig]) -> dict[TrainConfig, StepCost]:
        """Return the costs of the combinations that the trainer accepts, and note how many it refuses, and why."""
        costs: dict[TrainConfig, StepCost] = {}
        refusals = Counter[str]()
        for config in configs:
            try:
                costs[config] = self._compute_cost(config)
            except (InputError, NotImplementedError) as error:
                refusals[str(error)] += 1
        for reason, count in refusals.items():
            self.notes.append(f"{format_count(count, 'combination')} not possible: {reason}")
        return costs

    def _estimate_smallest(self, config: TrainConfig, change: Change) -> tuple[int, Change]:
        """Return the lowest estimate of a change, whose `config` the trainer accepts, and the change with it.

        Fewer gathered weights and less precise storage are added if the trainer accepts them, too.
        """
        fewer = with_fewest_gathered_weights(change, self._dims)
        variants = [*iter_with_less_precise_storage(change), *([] if fewer is None else [fewer])]
        estimates = [(estimate_peak(config, self._ranks), change)]
        for variant in variants:
            with suppress(InputError, NotImplementedError):
                estimates += [] if variant.config is None else [(estimate_peak(variant.config, self._ranks), variant)]
        return min(estimates, key=lambda estimate: estimate[0])

    def _try_groups(self, groups: list[list[Change]]) -> Iterator[int]:
        """Yield the index of each change of a group, then of the nearly fitting ones with less precise storage."""
        combinations_left = MAX_COMBINATIONS
        for group in groups:
            for change in group[:combinations_left]:
                yield from self._try_with_fewer_gathered_weights(change)
            for change in group[:combinations_left]:
                excess_bytes = (self.rows[self._try(change)].peak_bytes or 0) - (self._fit_bytes or 0)
                if 0 < excess_bytes <= EQUAL_SAVING_RATIO * self._storage_saving_bytes:
                    yield from map(self._try, iter_with_less_precise_storage(change))
            combinations_left -= len(group)
            if combinations_left < 0:
                self.notes.append(f"only the {MAX_COMBINATIONS} fastest combinations were tried")
                return

    def _try_with_fewer_gathered_weights(self, change: Change) -> Iterator[int]:
        """Yield the index of a change and, if it nearly fits, of the same change with fewer gathered weights."""
        index = self._try(change)
        yield index
        peak_bytes, fit_bytes = self.rows[index].peak_bytes, self._fit_bytes
        if (
            peak_bytes is not None
            and fit_bytes is not None
            and fit_bytes < peak_bytes <= fit_bytes * NEARLY_FITTING_RATIO
        ):
            fewer = with_fewest_gathered_weights(change, self._dims)
            if fewer is not None:
                yield self._try(fewer)

    def _try(self, change: Change) -> int:
        if change.config is None:
            return self._add_refused(change.name, "", change.refusal)
        if change.config in self._row_by_config:
            return self._row_by_config[change.config]
        try:
            peak_bytes, cost = self._predict(change.name, change.config)
        except (InputError, NotImplementedError) as error:
            self._row_by_config[change.config] = len(self.rows)
            return self._add_refused(change.name, format_flags(self._config, change.config), str(error))
        return self._add(change.name, change.config, peak_bytes, cost)

    def _predict(self, name: str, config: TrainConfig) -> tuple[int, StepCost]:
        """Return the bytes of the peak, and the cost."""
        self._set_activity(name)
        return self._compute_peak(config, self._ranks), self._compute_cost(config)

    def _add(self, name: str, config: TrainConfig, peak_bytes: int, cost: StepCost) -> int:
        configured = self.rows[0].peak_bytes if self.rows else peak_bytes
        fits = None if self._fit_bytes is None else peak_bytes <= self._fit_bytes
        self._row_by_config[config] = len(self.rows)
        flags, difference = format_flags(self._config, config), peak_bytes - (configured or 0)
        self.rows.append(AdvisedSetting(name, flags, peak_bytes, difference, cost, "", fits))
        return len(self.rows) - 1

    def _add_refused(self, name: str, flags: str, reason: str) -> int:
        self.rows.append(AdvisedSetting(name, flags, None, None, None, f"not possible: {reason}", None))
        return len(self.rows) - 1

    def _compute_cost(self, config: TrainConfig) -> StepCost:
        """Return the cost. Raises InputError or NotImplementedError if the trainer refuses the setting."""
        return compute_step_cost(*resolve_parallel_dims(config, rank=0, world_size=self._ranks), self._spec)


def _predict_peak(config: TrainConfig, ranks: int, device: str) -> int:
    return predict_run_memory(config, ranks, device).prediction.peak_bytes


def _sort_by_time(costs: list[tuple[Change, StepCost]]) -> list[list[Change]]:
    """Sort by simulated time; changes without one come last, by FLOPs. Nearly equal changes form a group.

    In a group, changes of fewer settings come first.
    """
    timed = [(cost.simulated_s, index) for index, (_, cost) in enumerate(costs) if cost.simulated_s is not None]
    untimed = [(cost.step_flops, index) for index, (_, cost) in enumerate(costs) if cost.simulated_s is None]
    groups: list[list[int]] = []
    for measures in (timed, untimed):
        largest = -1.0
        for measure, index in sorted(measures):
            if measure > largest:
                groups.append([])
                largest = measure * EQUAL_TIME_RATIO
            groups[-1].append(index)

    def count_changes(index: int) -> int:
        return sum(label != AS_CONFIGURED for label in costs[index][0].labels)

    return [[costs[index][0] for index in sorted(sorted(group), key=count_changes)] for group in groups]


def _find_spec(time_on: str | None, *, is_needed: bool) -> DeviceSpec | None:
    if time_on is not None:
        return require_device_spec(time_on, option="time_on")
    return find_machine_spec() or (require_device_spec("H100", option="time_on") if is_needed else None)
