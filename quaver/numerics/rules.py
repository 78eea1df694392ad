"""The rules of alarms: what each measures of a tensor, where it alarms, and where it is quiet again.

Each has its threshold from the formats or from optimizers, not from runs; docs/monitor.md derives them. Beyond
`raise_at` a tensor is bad, and stays so until it is on the good side of `clear_at`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quaver.numerics.expected import (
    cast_bound_db,
    named_format,
    result_db,
    rounding_bound_db,
    underflow_at,
)
from quaver.numerics.mismatch import HEALTHY
from quaver.numerics.remedies import no_remedies, remedies, remedies_of_mismatch, remedies_of_sums
from quaver.numerics.seen import Sample, TensorStatistics
from quaver.recipes.formats import E5M2, Float8Format

BIT_DB = 20 * math.log10(2)
"""Decibels that one bit of the mantissa is worth."""

JUMP_BITS = 4.0
"""The scale of before would clip: the amax of a Gaussian is about six of its deviations; 2^-4 of that, a third."""

GRADIENT_JUMP_BITS = 6.0
"""The same for the rms of gradients, which follows the batch, too: a margin of 4, not a derivation."""

GROWTH_BITS = 8.0
"""From 1 to the largest value of e4m3."""

PEER_BITS = {"weight": 4.0, "grad_output": 16.0}
"""How far a tensor's rms may be from that of its peers in other blocks."""

ADAM_EPS = 1e-8
"""A gradient below the eps of Adam's denominator no longer moves a weight by the learning rate."""

PERSISTENT = ("delayed", "static")


@dataclass(frozen=True)
class Measure:
    """The figure that a rule measured of one tensor, and its thresholds."""

    value: float
    raise_at: float
    clear_at: float
    above: bool = True
    """Whether large values are bad."""
    since: int | None = None
    """The step that was bad first, where that is known to be an earlier one."""
    level: float | None = None
    """The figure compared with the samples before, where their level may become another for good."""
    usual: float | None = None
    """The level of the samples before."""

    @property
    def is_bad(self) -> bool:
        return self.value > self.raise_at if self.above else self.value < self.raise_at

    @property
    def is_near(self) -> bool:
        """Whether an alarm goes on."""
        return self.value > self.clear_at if self.above else self.value < self.clear_at

    @property
    def excess(self) -> float:
        return self.value - self.raise_at if self.above else self.raise_at - self.value


@dataclass(frozen=True)
class Rule:
    """One rule.

    `samples` in a row must be bad before it alarms, and good before that is cleared. What `spreads` makes other tensors
    of the step bad, too.
    """

    name: str
    measure: Callable[[TensorStatistics, Sample], Measure | None]
    text: str
    """The sentence of its alarm; a format string of `value`, `threshold` and `rank`."""
    samples: int = 1
    spreads: bool = True
    remedies: Callable[[TensorStatistics, Sample], tuple[dict[str, Any], ...]] = no_remedies

    @property
    def remedied(self) -> bool:
        """Whether another recipe may help."""
        return self.remedies is remedies


# ---- one tensor ------------------------------------------------------------------------------------------------------


def _nonfinite(now: TensorStatistics, sample: Sample) -> Measure | None:
    count = now.nonfinite
    return None if count is None else Measure(math.inf if math.isnan(count) else count, 0, 0)


def _ranks(now: TensorStatistics, sample: Sample) -> Measure | None:
    return Measure(float(now.position in sample.ranks), 0, 0) if now.key.operand == "weight" else None


def _cast_facts(now: TensorStatistics) -> tuple[Float8Format, float] | None:
    """The format and SQNR of a cast of something."""
    fmt = named_format(now.about.get("dtype"))
    if fmt is None or now.is_result or now.sqnr_db is None or not now.rms or now.nonfinite:
        return None
    return fmt, now.sqnr_db


def _codes(now: TensorStatistics, sample: Sample) -> Measure | None:
    """SQNR below what rounding at the recorded scale can lose."""
    facts = _cast_facts(now)
    if facts is None or now.saturated or now.scale_max is None or not now.rms:
        return None
    bound = cast_bound_db(facts[0], now.rms, now.scale_max) - 0.1  # sums in float32
    return Measure(facts[1], bound, bound, above=False)


def _saturation(now: TensorStatistics, sample: Sample) -> Measure | None:
    """A scale that was made from its tensor clips nothing."""
    if _cast_facts(now) is None or now.saturated is None or _is_persistent(now):
        return None
    return Measure(now.saturated, 0, 0)


def _clipping(now: TensorStatistics, sample: Sample) -> Measure | None:
    """A persistent scale clips what has grown; bad where that takes more than rounding can."""
    facts = _cast_facts(now)
    if facts is None or now.saturated is None or not _is_persistent(now):
        return None
    harms = facts[1] < rounding_bound_db(facts[0])
    return Measure(now.saturated if harms else 0.0, 0, 0)


def _is_persistent(now: TensorStatistics) -> bool:
    scaling = now.about.get("scaling")
    return str(scaling or "delayed").startswith(PERSISTENT)


def _underflow(now: TensorStatistics, sample: Sample) -> Measure | None:
    facts = _cast_facts(now)
    if facts is None or now.underflow is None:
        return None
    # The recipes with e5m2 take its bound for good enough in gradients, whose distribution is wider than a Gaussian.
    fmt = E5M2 if now.key.operand == "grad_output" else facts[0]
    at = underflow_at(rounding_bound_db(fmt))
    return Measure(now.underflow, at, at / 2)


def _sqnr(now: TensorStatistics, sample: Sample) -> Measure | None:
    facts = _cast_facts(now)
    if facts is None or now.saturated:
        return None
    bound = rounding_bound_db(facts[0])
    return Measure(facts[1], bound - 0.1, bound + BIT_DB / 2, above=False)


def _zero(now: TensorStatistics, sample: Sample) -> Measure | None:
    """All elements are zero. Gradients may be at first, behind weights that begin as zeros."""
    if now.amax is None or now.nonfinite or not now.numel:
        return None
    return Measure(float(now.amax == 0), 0, 0)


OPERANDS_OF = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The operands of each result."""

DEAD = 1 / 64
"""The share of one expert of 64."""


def _dead(now: TensorStatistics, sample: Sample) -> Measure | None:
    """More of the weight's gradient is exactly zero than ever before: rows, columns or experts that no token uses.

    Of a linear whose operands have exact zeros anyway, as behind ReLU or dropout, units are idle by chance.
    """
    zeros, before = now.zeros, sample.before(now)
    if now.key.operand != "grad_weight" or zeros is None or zeros == 1 or not before:
        return None
    if not now.about.get("experts") and any(_usual_zeros(each, sample) > DEAD for each in _operands_of(now, sample)):
        return None
    return Measure(zeros - _usual_zeros(now, sample), DEAD, DEAD / 2)


def _usual_zeros(now: TensorStatistics, sample: Sample) -> float:
    """The largest share of zeros in the older half of the samples before."""
    before = sample.before(now)
    return max((each.zeros or 0.0 for each in before[: len(before) // 2 + 1]), default=0.0)


def _operands_of(result: TensorStatistics, sample: Sample) -> list[TensorStatistics]:
    """The casts that a result is made of."""
    of_layer = sample.by_layer[result.key.layer]
    return [each for name in OPERANDS_OF[result.key.operand] for each in of_layer.get(name, [])]


def _jump(now: TensorStatistics, sample: Sample) -> Measure | None:
    """Powers of two between a level and all of its last four, where that is beyond six of its deviations.

    The level of a weight or an activation is its amax, in one sample. Gradients follow their batch: theirs is the rms,
    and the sample before must have jumped, too. A weight in the first samples is compared with those that there are,
    and jumps by `GROWTH_BITS`: a learning rate that is far too high acts in the first step.
    """
    is_gradient = now.key.operand.startswith("grad")
    before = sample.before(now)
    levels = [each.log2("rms" if is_gradient else "amax") for each in [*before[-8:], now]]
    recent, past = (levels[-2:], levels[:-2]) if is_gradient else (levels[-1:], levels[:-1])
    usual = [level for level in past if level is not None]
    is_early = len(usual) < 3
    if None in recent or now.nonfinite or not usual or (is_early and now.key.operand != "weight"):
        return None
    at = GROWTH_BITS
    if not is_early:
        steps = [abs(b - a) for a, b in zip(usual, usual[1:], strict=False)]
        at = max(GRADIENT_JUMP_BITS if is_gradient else JUMP_BITS, 6 * 1.4826 * statistics.median(steps))
    low, high = min(usual[-4:]), max(usual[-4:])
    reached = [level for level in recent if level is not None]
    value = max(min(reached) - high, low - max(reached), 0.0)
    since = before[-1].step if is_gradient else now.step
    return Measure(value, at, at / 2, since=since, level=reached[-1], usual=statistics.median(usual[-4:]))


def _growth(now: TensorStatistics, sample: Sample) -> Measure | None:
    """Powers of two in the last 8 or 16 samples, if the later half of them grew as fast as the earlier.

    Of weights and activations: gradients come back from small values, as they do where attention opens again.
    """
    if now.key.operand not in ("weight", "input") or now.nonfinite:
        return None
    levels = [each.log2("rms") for each in [*sample.before(now), now]]
    grown = max((_steady(levels[-length - 1 :]) for length in (8, 16) if len(levels) > length), default=None)
    return None if grown is None else Measure(grown, GROWTH_BITS, GROWTH_BITS / 2)


def _steady(levels: list[float | None]) -> float:
    """The growth of levels of which the later half rose no slower than three quarters of the earlier; else 0."""
    found = [level for level in levels if level is not None]
    if len(found) < len(levels):
        return 0.0
    half = len(found) // 2
    early, late = found[half] - found[0], found[-1] - found[half]
    rises = sum(b > a for a, b in zip(found, found[1:], strict=False))
    return early + late if early > 0 and late >= 0.75 * early and rises >= len(found) - 2 else 0.0


# ---- several tensors -------------------------------------------------------------------------------------------------


def _peers(now: TensorStatistics, sample: Sample) -> Measure | None:
    """Powers of two between an rms and the median of those with the same part in other blocks."""
    at, level = PEER_BITS.get(now.key.operand), now.log2("rms")
    found = [each.log2("rms") for each in sample.by_peers[now.peers] if each is not now]
    others = [each for each in found if each is not None]
    if at is None or level is None or now.nonfinite or len(others) < 3:
        return None
    return Measure(abs(level - statistics.median(others)), at, at / 2)


def _result(now: TensorStatistics, sample: Sample) -> Measure | None:
    """A result's SQNR, three bits below what the errors of its operands explain: a few of its rows are compared."""
    if not now.is_result or now.sqnr_db is None or not now.rms or now.nonfinite:
        return None
    operands = [_operand(sample, now.key.layer, name) for name in OPERANDS_OF[now.key.operand]]
    left, right = operands
    if left is None or right is None or not (now.numel and left.numel and right.numel and left.rms and right.rms):
        return None
    contracted = math.sqrt(left.numel * right.numel / now.numel)
    cancelled = min(now.rms**2 / (contracted * (left.rms * right.rms) ** 2), 1.0)
    expected = result_db(_db(left), _db(right), cancelled)
    at = min(expected, 40.0) - 3 * BIT_DB
    return Measure(now.sqnr_db, at, at + BIT_DB, above=False)


def _sums(now: TensorStatistics, sample: Sample) -> Measure | None:
    """The sums of a GPU, with the setting in use, lose more than the casts and than rounding the result to bfloat16."""
    found = sample.sums.get(now.position)
    if found is None:
        return None
    bound = found.bound()
    return Measure(found.used(bool(now.about.get("use_fast_accum"))), bound, bound + BIT_DB, above=False)


def _operand(sample: Sample, layer: str, name: str) -> TensorStatistics | None:
    """The worse cast of an operand."""
    found = sample.by_layer[layer].get(name, [])
    return min(found, key=_db, default=None)


def _db(operand: TensorStatistics) -> float:
    return math.inf if operand.sqnr_db is None else operand.sqnr_db


def _vanishing(now: TensorStatistics, sample: Sample) -> Measure | None:
    """The largest of all gradients of weights."""
    if now.key.operand != "grad_weight" or not now.rms:
        return None
    every = [each.rms or 0.0 for each in sample.seen if each.key.operand == "grad_weight"]
    return Measure(now.rms, ADAM_EPS, 2 * ADAM_EPS, above=False) if now.rms == max(every) else None


def _unchanged(now: TensorStatistics, sample: Sample) -> Measure | None:
    """A weight with a gradient that stays the same to the bit while others change: no optimizer has it."""
    before = sample.before(now)
    if now.key.operand != "weight" or not before or not _has_gradient(now, sample):
        return None
    others = [each for each in sample.seen if each.key.operand == "weight" and each.key.layer != now.key.layer]
    moved = [each for each in others if _has_gradient(each, sample) and not _is_same(each, sample)]
    return Measure(float(bool(moved) and _is_same(now, sample)), 0, 0)


def _is_same(now: TensorStatistics, sample: Sample) -> bool:
    before = sample.before(now)
    return bool(before) and all(before[-1].values.get(k) == now.values.get(k) for k in ("amax", "rms", "smallest"))


def _has_gradient(weight: TensorStatistics, sample: Sample) -> bool:
    return any(each.amax for each in sample.by_layer[weight.key.layer].get("grad_weight", []))


def _mismatch(now: TensorStatistics, sample: Sample) -> Measure | None:
    error = now.token_mult_prob_error
    return None if error is None else Measure(error, HEALTHY[1], HEALTHY[0])


SUMS_COST = "{value:.1f} dB of the GPU's sums, below {threshold:.1f} of its casts or of rounding to bfloat16"
CLIPPED = "{value:.2%} of the elements are clipped"

RULES = (
    Rule("nonfinite", _nonfinite, "has {value:g} elements that are not finite"),
    Rule("ranks", _ranks, "is another one on rank {rank} than on its replicas"),
    Rule(
        "codes", _codes, "{value:.1f} dB; no rounding at this scale is below {threshold:.1f}: codes or scale are wrong"
    ),
    Rule("saturation", _saturation, CLIPPED, remedies=remedies),
    Rule("saturation", _clipping, CLIPPED, 3, remedies=remedies),
    Rule("result", _result, "{value:.1f} dB against high precision, its operands explain {threshold:.1f}", 2),
    Rule("zero", _zero, "is all zeros", samples=2),
    Rule("sqnr", _sqnr, "{value:.1f} dB; rounding alone leaves at least {threshold:.1f}", 2, False, remedies),
    Rule("underflow", _underflow, "{value:.1%} of the elements become zero, above {threshold:.1%}", 2, False, remedies),
    Rule("sums", _sums, SUMS_COST, 1, False, remedies_of_sums),
    Rule("jump", _jump, "changed by 2^{value:.1f}, above 2^{threshold:.1f}"),
    Rule("growth", _growth, "rms grew by 2^{value:.1f} and does not slow down"),
    Rule("peers", _peers, "rms is 2^{value:.1f} from that of other blocks, above 2^{threshold:.1f}", 2, False),
    Rule("dead", _dead, "{value:.1%} more of the gradient is exactly zero than before", 3, False),
    Rule("vanishing", _vanishing, "rms {value:.1e} is below the eps of Adam, {threshold:.0e}", 2, False),
    Rule(
        "mismatch",
        _mismatch,
        "mean exp|difference| of log probabilities to the trainer's is {value:.3f}, above {threshold:.2f}",
        spreads=False,
        remedies=remedies_of_mismatch,
    ),
    Rule("unchanged", _unchanged, "did not change while other weights did: no optimizer has it", 3, False),
)
"""In the order in which they explain each other: what is not finite explains a jump, not the reverse."""

REMEDIED = frozenset(rule.name for rule in RULES if rule.remedied)
"""The rules whose cause another recipe may end."""
