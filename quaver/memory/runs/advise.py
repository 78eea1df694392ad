"""What would lower the peak of a run's memory, and what it would cost: each setting tried, in prediction.

    advice = advise(config, 8, fit_bytes=80 * 1024**3, device="H100")
    advice.rows[advice.best].words

A row is a setting with its predicted peak, the FLOPs that it computes again, and the modelled time of a step
(step_time.py). With `fit_bytes`, combinations are tried too, from the fastest on, until one fits.
Modelled times that are nearly equal count as equal: then the fewest changes win, and tensorwise before rowwise.

[Note: a quick search] A deep model is predicted from shallow ones (peak_by_depth.py) where that is quicker and each
moment of a third depth is as the other two say; else in full. Each row says which. If the run as it is configured can
be predicted from shallow ones and comes out otherwise than in full, no row is. To compile takes a quarter of a minute
each time, so what the run compiles is compared as eager code; the run as it is configured, and what fits or nearly
does, are predicted in full, and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quaver.devices import DEVICE_SPECS, DeviceSpec, device_spec, find_device_spec
from quaver.trainer.config import TrainConfig
from quaver.memory.runs.changes import Change, combinations, least_gathered, single_changes, words_of
from quaver.memory.runs.peak_by_depth import extrapolated_peak, saves_time
from quaver.memory.runs.predict import predict_memory
from quaver.memory.runs.step_time import StepCost, step_cost
from quaver.trainer.layout import resolve

AS_CONFIGURED = "as configured"
EQUALLY_FAST = 1.02
"""The ratio of two modelled times below which they are taken for equal: the model knows no better."""
NEARLY_FITS = 1.1
"""The ratio to what is to fit up to which it is worth trying to gather fewer weights."""
MOST_TRIED = 60
"""Combinations that are predicted at the most."""
FULLY = "predicted in full"
AS_EAGER = ", as eager code"
TIMES = (
    "times are modelled: matmuls, casts and what is computed again; without communication, and without what row-wise "
    "scaling costs inside of the matmuls"
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One setting of the run."""

    change: str
    words: str
    """The flags that apply it to the run that was asked about."""
    peak_bytes: int | None
    """None where it cannot be predicted, or the trainer refuses it; `note` says why."""
    difference_bytes: int | None
    """To what is configured; negative for less."""
    cost: StepCost | None
    note: str
    fits: bool | None
    """None where nothing was asked to fit, or it is not known."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        cost = self.cost
        return {
            "change": self.change,
            "words": self.words,
            "peak_bytes": self.peak_bytes,
            "difference_bytes": self.difference_bytes,
            "recomputed_flops": None if cost is None else cost.recomputed_flops,
            "step_flops": None if cost is None else cost.flops,
            "modelled_s": None if cost is None else cost.modelled_s,
            "note": self.note,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Advice:
    """What would change the peak of a run, the run itself first."""

    rows: list[Row]
    fit_bytes: int | None
    best: int | None
    """The row of the fastest setting that fits; None where none does, or nothing was asked to fit."""
    nearest: int | None
    """Where none fits, the row with the least peak."""
    device: str | None
    """Whose times are modelled."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "fit_bytes": self.fit_bytes,
            "best": self.best,
            "nearest": self.nearest,
            "device": self.device,
            "notes": self.notes,
        }


def advise(
    config: TrainConfig,
    ranks: int = 1,
    *,
    fit_bytes: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Predict what changing the settings of a run would do to the peak of a rank's memory.

    Args:
        fit_bytes: find the fastest setting whose peak is at most this.
        device: a GPU's name, such as "H100", to model times for. None for this machine's; where it has none that is
            known, for an H100 if `fit_bytes` asks for the fastest, else for none.
        progress: told what is predicted next.
    Raises:
        ValueError: an unknown device, and what the run itself would refuse.
        NotImplementedError: the run as configured cannot be predicted.
    """
    spec = _spec(device, is_needed=fit_bytes is not None)
    search = _Search(config, ranks, fit_bytes, spec, progress or (lambda words: None))
    search.try_singly()
    best = None if fit_bytes is None else search.fastest_that_fits()
    rows = search.rows
    known = [index for index, row in enumerate(rows) if row.peak_bytes is not None]
    nearest = min(known, key=lambda index: rows[index].peak_bytes or 0) if fit_bytes and best is None else None
    return Advice(rows, fit_bytes, best, nearest, None if spec is None else spec.name, search.notes)


class _Search:
    """The settings tried so far; each is predicted once."""

    def __init__(
        self, config: TrainConfig, ranks: int, fit_bytes: int | None, spec: DeviceSpec | None, progress: Progress
    ) -> None:
        self.rows: list[Row] = []
        self.notes = [TIMES]
        self._config, self._ranks, self._fit_bytes = config, ranks, fit_bytes
        self._spec, self._progress = spec, progress
        resolved, self._layout = resolve(config, rank=0, world_size=ranks)
        self._batch = resolved.training.step_batch_size
        self._tried: dict[TrainConfig, int] = {}
        self._before_bytes: int | None = None
        self._progress(AS_CONFIGURED)
        self._add(Change(AS_CONFIGURED, config), predict_memory(config, ranks).prediction.peak_bytes, FULLY)
        self._before_bytes = self._compare_with(_quick(config))
        if config.training.compile:
            self.notes.append(
                f"changes are compared as eager code, which takes {self._before_bytes:,} bytes as configured; "
                "what fits or nearly fits is predicted compiled, too"
            )

    def _compare_with(self, quick: TrainConfig) -> int:
        """The peak of the run as changes are predicted; finds out whether shallow models tell it to the byte."""
        full = self.rows[0].peak_bytes
        if quick != self._config or full is None:
            full = predict_memory(quick, self._ranks).prediction.peak_bytes
        extrapolated = extrapolated_peak(quick, self._ranks) if saves_time(quick) else None
        self._may_extrapolate = extrapolated is None or extrapolated.peak_bytes == full
        return full

    def try_singly(self) -> None:
        """Each change alone."""
        for change in single_changes(self._config, self._layout, self._batch):
            self._try(change)

    def fastest_that_fits(self) -> int | None:
        """Combinations from the fastest on; the row of the first that fits, predicted in full."""
        changes = [Change(AS_CONFIGURED, self._config), *combinations(self._config, self._batch)]
        by_config = {change.config: change for change in reversed(changes)}
        for number, change in enumerate(_fastest_first([(each, self._cost(each)) for each in by_config.values()])):
            if number == MOST_TRIED:
                self.notes.append(f"only the {MOST_TRIED} fastest combinations were tried")
                break
            for index in self._tries(change):
                if self._fits_in_full(index):
                    return index
        return None

    def _tries(self, change: Change) -> Iterable[int]:
        """The row of a change, and, if it nearly fits, that of gathering fewer weights as well."""
        index = self._try(change)
        yield index
        peak_bytes, fit_bytes = self.rows[index].peak_bytes, self._fit_bytes
        if peak_bytes is not None and fit_bytes is not None and fit_bytes < peak_bytes <= fit_bytes * self._nearly:
            fewer = least_gathered(change, self._layout)
            if fewer is not None:
                yield self._try(fewer)

    def _try(self, change: Change) -> int:
        if change.config is not None and change.config in self._tried:
            return self._tried[change.config]
        if change.config is None:
            return self._add(change, None, f"not possible: {change.refusal}")
        self._progress(change.name)
        try:
            return self._add(change, *self._predict(_quick(change.config)))
        except (ValueError, NotImplementedError) as error:
            return self._add(change, None, f"not possible: {error}")

    def _predict(self, quick: TrainConfig) -> tuple[int, str]:
        """The peak, and how it was found."""
        as_eager = AS_EAGER if quick.training.compile != self._config.training.compile else ""
        if self._may_extrapolate and saves_time(quick):
            extrapolated = extrapolated_peak(quick, self._ranks)
            if extrapolated is not None:
                return extrapolated.peak_bytes, _extrapolated_from(extrapolated.depths) + as_eager
        return predict_memory(quick, self._ranks).prediction.peak_bytes, FULLY + as_eager

    def _fits_in_full(self, index: int) -> bool:
        """Whether a row fits; where that was not found out in full, and it may, it is now."""
        row, fit_bytes = self.rows[index], self._fit_bytes
        if row.peak_bytes is None or fit_bytes is None:
            return False
        if row.note != FULLY and row.peak_bytes <= fit_bytes * (self._nearly if self._config.training.compile else 1):
            config = next(config for config, each in self._tried.items() if each == index)
            self._progress(f"{row.change}, in full")
            try:
                peak_bytes = predict_memory(config, self._ranks).prediction.peak_bytes
            except (ValueError, NotImplementedError) as error:
                self.rows[index] = replace(row, fits=None, note=f"{row.note}; in full not possible: {error}")
            else:
                self.rows[index] = self._row(row.change, config, peak_bytes)
        return bool(self.rows[index].fits)

    def _add(self, change: Change, peak_bytes: int | None, note: str) -> int:
        if change.config is None:
            self.rows.append(Row(change.name, "", None, None, None, note, None))
        else:
            self._tried[change.config] = len(self.rows)
            self.rows.append(self._row(change.name, change.config, peak_bytes, note))
        return len(self.rows) - 1

    def _row(self, name: str, config: TrainConfig, peak_bytes: int | None, note: str = FULLY) -> Row:
        difference = None
        if peak_bytes is not None:
            before = self.rows[0].peak_bytes if note == FULLY and self.rows else self._before_bytes
            difference = peak_bytes - (peak_bytes if before is None else before)
        fits = None if peak_bytes is None else self._fits(peak_bytes, is_eager=note.endswith(AS_EAGER))
        cost = None if peak_bytes is None else self._cost_of(config)
        return Row(name, words_of(self._config, config), peak_bytes, difference, cost, note, fits)

    def _fits(self, peak_bytes: int, *, is_eager: bool) -> bool | None:
        """None where it is not known: of eager code that is too large and may fit when it is compiled."""
        if self._fit_bytes is None or (is_eager and self._fit_bytes < peak_bytes <= self._fit_bytes * self._nearly):
            return None
        return peak_bytes <= self._fit_bytes

    @property
    def _nearly(self) -> float:
        """NEARLY_FITS, and what compiling takes off the run as it is configured."""
        eager_bytes, compiled_bytes = self._before_bytes, self.rows[0].peak_bytes
        return NEARLY_FITS * (max(1.0, eager_bytes / compiled_bytes) if eager_bytes and compiled_bytes else 1)

    def _cost(self, change: Change) -> StepCost | None:
        """None for what the trainer refuses of the model or its layout, which a prediction says then."""
        try:
            return None if change.config is None else self._cost_of(change.config)
        except (ValueError, NotImplementedError):
            return None

    def _cost_of(self, config: TrainConfig) -> StepCost:
        return step_cost(*resolve(config, rank=0, world_size=self._ranks), self._spec)


def _extrapolated_from(depths: tuple[int, int, int]) -> str:
    first, second, third = depths
    return f"extrapolated from {first}, {second} and {third} blocks"


def _quick(config: TrainConfig) -> TrainConfig:
    """The same without compiling, if it can do without (Note: a quick search)."""
    if config.activation_checkpoint.mode == "memory_budget":
        return config
    return replace(config, training=replace(config.training, compile=False))


def _fastest_first(changes: list[tuple[Change, StepCost | None]]) -> list[Change]:
    """By modelled time, or where that is not known by FLOPs; equal ones by the number of changes, then as given."""
    known = [
        (cost.modelled_s or float(cost.flops), place) for place, (_, cost) in enumerate(changes) if cost is not None
    ]
    groups: list[tuple[float, list[int]]] = []
    for time, place in sorted(known):
        if groups and time <= groups[-1][0] * EQUALLY_FAST:
            groups[-1][1].append(place)
        else:
            groups.append((time, [place]))
    in_order = [place for _, group in groups for place in sorted(group, key=lambda i: (_number_of(changes[i][0]), i))]
    return [changes[place][0] for place in in_order]


def _number_of(change: Change) -> int:
    return 0 if change.name == AS_CONFIGURED else 1 + change.name.count(";")


def _spec(device: str | None, *, is_needed: bool) -> DeviceSpec | None:
    if device is not None:
        spec = find_device_spec(device)
        if spec is None:
            names = ", ".join(each.name for each in DEVICE_SPECS)
            raise ValueError(f"no data about device {device!r}: expected one of {names}")
        return spec
    here = device_spec(torch.device("cuda")) if torch.cuda.is_available() else None
    return here or (find_device_spec("H100") if is_needed else None)
