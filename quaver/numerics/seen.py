"""One sample of a record as rules read it: the statistics of each tensor, beside those of earlier samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from quaver.numerics.matmul_sums import Sums

MEMORY = 16
"""Earlier samples of each tensor that rules can look at."""

ORDER = ("weight", "input", "output", "grad_output", "grad_input", "grad_weight")
"""The operands and results of a layer, in the order in which a step has them."""


class TensorKey(NamedTuple):
    """Identifies a tensor of a model in all samples; `cast` is "row", "column", "both" or "result"."""

    layer: str
    operand: str
    cast: str


ROLLOUT = TensorKey("rollout", "output", "result")
"""Stands for the log probabilities of a rollout beside the trainer's, which have no statistics of a tensor."""


def order_of(layer: int, operand: str) -> tuple[int, int, int]:
    """When a step computes an operand of a layer, by its place in the forward: weights come first, which the step
    finds; then the forward, then the backward.
    """
    place = ORDER.index(operand)
    stage = 0 if place == 0 else 1 if place < 3 else 2
    return stage, -layer if stage == 2 else layer, place


@dataclass(frozen=True)
class TensorStatistics:
    """The statistics of one tensor at one step, as docs/monitor.md names them. None: it has none."""

    key: TensorKey
    position: int
    """In the list of tensors."""
    layer: int
    """In the list of layers, which is the order of the forward."""
    about: Mapping[str, Any]
    """The entry of the header."""
    step: int
    values: Mapping[str, float | None]

    def __getattr__(self, statistic: str) -> float | None:
        if statistic.startswith("_"):
            raise AttributeError(statistic)
        return self.values.get(statistic)

    @property
    def is_result(self) -> bool:
        return self.key.cast == "result"

    @property
    def order(self) -> tuple[int, int, int]:
        """When a step computes it."""
        return order_of(self.layer, self.key.operand)

    @cached_property
    def peers(self) -> tuple[str, str, str]:
        """The same for the tensors with the same part in other blocks."""
        return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", self.key.layer), self.key.operand, self.key.cast

    def log2(self, statistic: str) -> float | None:
        """The logarithm of a positive finite statistic; None for any other."""
        value = self.values.get(statistic)
        return math.log2(value) if value is not None and 0 < value < math.inf else None


@dataclass
class Sample:
    """The tensors of one step, and what came before them."""

    step: int
    seen: list[TensorStatistics]
    past: Mapping[TensorKey, Sequence[TensorStatistics]]
    """Earlier samples of each tensor, oldest first, `MEMORY` at most."""
    recipes: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The SQNR that each position would have under other recipes, where that was tried."""
    sums: Mapping[int, Sums] = field(default_factory=dict)
    """By position of a result, what the sums of a GPU would lose, where that was computed."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """By position, a rank whose weight is another than that of its replicas."""

    @cached_property
    def by_peers(self) -> dict[tuple[str, str, str], list[TensorStatistics]]:
        found = defaultdict(list)
        for each in self.seen:
            found[each.peers].append(each)
        return dict(found)

    @cached_property
    def by_layer(self) -> dict[str, dict[str, list[TensorStatistics]]]:
        found: dict[str, dict[str, list[TensorStatistics]]] = defaultdict(lambda: defaultdict(list))
        for each in self.seen:
            found[each.key.layer][each.key.operand].append(each)
        return {layer: dict(operands) for layer, operands in found.items()}

    def before(self, now: TensorStatistics) -> Sequence[TensorStatistics]:
        return list(self.past.get(now.key, ()))


class History:
    """Reads samples one after the other, and remembers the last ones of each tensor."""

    def __init__(self) -> None:
        self._past: dict[TensorKey, deque[TensorStatistics]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._last: Sample | None = None

    def read(self, header: Mapping[str, Any], sample: Mapping[str, Any]) -> Sample:
        """The next sample of a record, with the header that it stands below."""
        for each in self._last.seen if self._last else ():
            self._past[each.key].append(each)
        positions = sample.get("tensors") or range(len(header["tensors"]))
        names = [name for name in header["statistics"] if sample.get(name) is not None]
        layers = {
            layer: index for index, layer in enumerate(dict.fromkeys(each["layer"] for each in header["tensors"]))
        }
        seen = []
        for index, position in enumerate(positions):
            about = header["tensors"][position]
            values = {name: number(sample[name][index]) for name in names}
            key = TensorKey(about["layer"], about["operand"], about["cast"])
            if any(value is not None for value in values.values()):
                seen.append(TensorStatistics(key, position, layers[key.layer], about, int(sample["step"]), values))
        if sample.get("mismatch"):
            of_rollout = {name: number(value) for name, value in sample["mismatch"].items()}
            seen.append(TensorStatistics(ROLLOUT, -1, len(layers), {}, int(sample["step"]), of_rollout))
        recipes = {
            recipe: dict(zip(positions, map(number, values), strict=True))
            for recipe, values in (sample.get("whatif") or {}).items()
        }
        by_position = {
            recipe: [found.get(position) for position in range(len(header["tensors"]))]
            for recipe, found in recipes.items()
        }
        ranks = {int(position): int(rank) for position, rank in (sample.get("disagree") or {}).items()}
        self._last = Sample(int(sample["step"]), seen, self._past, by_position, _sums(sample, positions), ranks)
        return self._last


def _sums(sample: Mapping[str, Any], positions: Iterable[int]) -> dict[int, Sums]:
    columns = [(sample.get("sums") or {}).get(name) for name in Sums._fields]
    if None in columns:
        return {}
    rows = zip(positions, zip(*columns, strict=True), strict=True)
    return {position: Sums(*map(float, values)) for position, values in rows if None not in values}


def number(value: Any) -> float | None:
    """A number of a record, whose NaN and infinities are strings."""
    return None if value is None else float(value)
