"""`Sampling`: the state of a monitor in the current step, which `Monitor` and the operations of observe.py share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quaver.numerics.accumulation import Accumulation
from quaver.numerics.matmul_sums import SampledRows
from quaver.torch_private.autograd import runs_in_backward


class SampledInput(NamedTuple):
    """The input of a forward, sampled to compare grad_weight with; see [Note: high precision in backward] in
    observe.py.
    """

    columns: Tensor
    rows: SampledRows | None
    """Some rows of the transposed input; see [Note: sums] in observe.py."""


@dataclass
class Sampling:
    """The state of one monitor that its operations read and write. Numbers of weights are unique in the process."""

    accumulation: Accumulation | None = None
    """How the GPU accumulates whose sums the monitor computes."""
    is_on: bool = False
    """Whether this step is sampled."""
    with_extras: frozenset[int] = frozenset()
    """The numbers of the linears whose casts get extra statistics (extra_statistics.py)."""
    with_sums: frozenset[int] = frozenset()
    """The numbers of the linears whose sums by `accumulation` are computed in this step."""
    has_run: bool = False
    """Whether a linear with a probe ran on this rank since the last step."""
    has_run_backward: bool = False
    """Whether a linear with a probe ran in a backward since the last step."""
    inputs: dict[tuple[int, int], SampledInput] = field(default_factory=dict)
    """Sampled inputs, by number and the address of their codes."""
    rows: dict[tuple[tuple[int, int], str, str], SampledRows | None] = field(default_factory=dict)
    """Rows of operands, by number and group, operand and direction; see [Note: sums] in observe.py."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """The weights of this step's forwards by number, for backwards that only have codes."""
    weight_sizes: dict[int, int] = field(default_factory=dict)
    """How many elements of its weight each linear or grouped matmul multiplies by on this rank; by number."""
    extras: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Extras [EXTRAS_WIDTH], by number and name of the site."""

    def start_step(
        self, *, is_on: bool, with_extras: frozenset[int] = frozenset(), with_sums: frozenset[int] = frozenset()
    ) -> None:
        """Discard the state of the last step, and sample the next one if `is_on`."""
        self.is_on, self.with_extras, self.with_sums = is_on, with_extras, with_sums
        self.has_run = self.has_run_backward = False
        for kept in (self.inputs, self.rows, self.weights, self.weight_sizes, self.extras):
            kept.clear()

    def assign_number(self) -> int:
        """Return a new number for a weight, whose matmuls this sampling observes until `close`."""
        number = next(_numbers)
        _samplings[number] = self
        return number

    def close(self) -> None:
        """Stop observing the weights of this monitor."""
        self.start_step(is_on=False)
        for number in [number for number, sampling in _samplings.items() if sampling is self]:
            del _samplings[number]


_numbers = itertools.count()
_samplings: dict[int, Sampling] = {}
"""Samplings by the number of a weight, the only argument of an operation in a graph that can identify its monitor."""


def record_use_and_get_sampling(number: int) -> Sampling | None:
    """Record that a matmul of a weight runs. Returns the sampling of its monitor in a sampled step, else None."""
    sampling = _samplings.get(number)
    if sampling is None:
        return None
    sampling.has_run = True
    sampling.has_run_backward |= runs_in_backward()
    return sampling if sampling.is_on else None
