"""The samples of a record as rules read them: the statistics of each tensor, now and in earlier samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from quaver.numerics.logprob_mismatch import Mismatch
from quaver.numerics.matmul_sums import MatmulSqnrs
from quaver.numerics.record import TensorKey
from quaver.numerics.statistics import STATISTICS

EARLIER_SAMPLES = 16
"""How many earlier samples of each tensor rules can see."""

STEP_ORDER = ("weight", "input", "output", "grad_output", "grad_input", "grad_weight")
"""The operands and results of a layer, in the order in which a step computes them."""


ROLLOUT_KEY = TensorKey("rollout", "output", "result")
"""Stands for the mismatch between rollout and trainer, which belongs to no tensor."""

_FIGURE_NAMES = frozenset((*STATISTICS, *(figure.name for figure in fields(Mismatch))))


def make_order_key(layer_index: int, operand: str) -> tuple[int, int, int]:
    """Return a sort key for when a step computes an operand: weights first, then the forward, then the backward.

    `layer_index`: the index of the layer in the forward.
    """
    operand_index = STEP_ORDER.index(operand)
    stage = 0 if operand_index == 0 else 1 if operand_index < 3 else 2
    return stage, -layer_index if stage == 2 else layer_index, operand_index


@dataclass(frozen=True)
class TensorStatistics:
    """The statistics of one tensor at one step, by the names of docs/monitor.md; None where one does not apply."""

    key: TensorKey
    position: int
    """The index in the list of tensors."""
    layer_index: int
    """The index in the list of layers, which is in the order of the forward."""
    entry: Mapping[str, Any]
    """The tensor's entry in the header."""
    step: int
    values: Mapping[str, float | None]

    def __getattr__(self, statistic: str) -> float | None:
        if statistic not in _FIGURE_NAMES:
            raise AttributeError(f"expected a statistic or a figure of a mismatch, got {statistic!r}")
        return self.values.get(statistic)

    @property
    def is_result(self) -> bool:
        return self.key.cast == "result"

    @property
    def order_key(self) -> tuple[int, int, int]:
        """See `make_order_key`."""
        return make_order_key(self.layer_index, self.key.operand)

    @cached_property
    def peer_key(self) -> tuple[str, str, str]:
        """A key that the same tensors of other blocks share."""
        return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", self.key.layer), self.key.operand, self.key.cast

    def get_log2(self, statistic: str) -> float | None:
        """Return the logarithm of a statistic, or None if it is not positive and finite."""
        value = getattr(self, statistic)
        return math.log2(value) if value is not None and 0 < value < math.inf else None


@dataclass
class Sample:
    """The tensors of one step, with their earlier samples."""

    step: int
    tensors: list[TensorStatistics]
    earlier: Mapping[TensorKey, Sequence[TensorStatistics]]
    """Up to `EARLIER_SAMPLES` earlier samples of each tensor, oldest first."""
    whatif: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The SQNR of each position under other recipes, if it was computed."""
    sums: Mapping[int, MatmulSqnrs] = field(default_factory=dict)
    """The errors of a GPU's sums by the position of a result, if they were computed."""
    outlier_ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank whose weight differs from its replicas, by position."""

    @cached_property
    def by_peer_key(self) -> dict[tuple[str, str, str], list[TensorStatistics]]:
        groups = defaultdict(list)
        for tensor in self.tensors:
            groups[tensor.peer_key].append(tensor)
        return dict(groups)

    @cached_property
    def by_layer(self) -> dict[str, dict[str, list[TensorStatistics]]]:
        layers: dict[str, dict[str, list[TensorStatistics]]] = defaultdict(lambda: defaultdict(list))
        for tensor in self.tensors:
            layers[tensor.key.layer][tensor.key.operand].append(tensor)
        return {layer: dict(operands) for layer, operands in layers.items()}

    def list_earlier(self, tensor: TensorStatistics) -> Sequence[TensorStatistics]:
        return list(self.earlier.get(tensor.key, ()))


class History:
    """Reads the samples of a record in order, and keeps the last ones of each tensor."""

    def __init__(self) -> None:
        self._earlier: dict[TensorKey, deque[TensorStatistics]] = defaultdict(lambda: deque(maxlen=EARLIER_SAMPLES))
        self._last: Sample | None = None

    def read(self, header: Mapping[str, Any], sample: Mapping[str, Any]) -> Sample:
        """Read the next sample of a record. `header` is the last header before it."""
        for tensor in self._last.tensors if self._last else ():
            self._earlier[tensor.key].append(tensor)
        step, names = int(sample["step"]), [name for name in header["statistics"] if sample.get(name) is not None]
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(entry["layer"] for entry in header["tensors"]))}
        tensors = []
        for position, entry in enumerate(header["tensors"]):
            key, values = TensorKey.from_header(entry), {name: _parse_number(sample[name][position]) for name in names}
            if any(value is not None for value in values.values()):
                tensors.append(TensorStatistics(key, position, layers[key.layer], entry, step, values))
        if sample.get("mismatch"):
            figures = {name: _parse_number(value) for name, value in sample["mismatch"].items()}
            tensors.append(TensorStatistics(ROLLOUT_KEY, -1, len(layers), {}, step, figures))
        whatif = {
            recipe: [_parse_number(value) for value in values]
            for recipe, values in (sample.get("whatif") or {}).items()
        }
        outlier_ranks = {int(position): int(rank) for position, rank in (sample.get("disagree") or {}).items()}
        self._last = Sample(step, tensors, self._earlier, whatif, _parse_sums(sample), outlier_ranks)
        return self._last


def _parse_sums(sample: Mapping[str, Any]) -> dict[int, MatmulSqnrs]:
    columns = [(sample.get("sums") or {}).get(name) for name in MatmulSqnrs._fields]
    if None in columns:
        return {}
    rows = enumerate(zip(*columns, strict=True))
    return {position: MatmulSqnrs(*map(float, values)) for position, values in rows if None not in values}


def _parse_number(value: Any) -> float | None:
    """Parse a number of a record, in which NaN and infinities are strings."""
    return None if value is None else float(value)
