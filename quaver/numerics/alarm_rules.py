"""The rules of alarms: what each rule measures of a tensor, and the thresholds that raise and clear its alarm.

Thresholds come from the formats and from optimizers, not from runs; docs/monitor.md derives them. Beyond `raise_at`
a tensor turns bad. It stays bad until it is on the good side of `clear_at`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quaver.numerics.error_bounds import (
    compute_cast_bound_db,
    compute_result_db,
    compute_rounding_bound_db,
    compute_underflow_share,
    parse_format,
)
from quaver.numerics.history import Sample, TensorStatistics
from quaver.numerics.logprob_mismatch import MISMATCH_BOUNDS
from quaver.numerics.remedies import suggest_accumulation, suggest_recipes, suggest_same_codes
from quaver.recipes.formats import E5M2, Float8Format
from quaver.recipes.linear_casts import MATMULS

BIT_DB = 20 * math.log10(2)
"""The decibels of one mantissa bit."""

JUMP_BITS = 4.0
"""Beyond it, the previous scale would clip typical elements: a Gaussian's amax is about six standard deviations, and
2^-4 of the amax is about a third of one."""

GRADIENT_JUMP_BITS = 6.0
"""`JUMP_BITS` with a margin of a factor of 4 for the rms of gradients, which depends on the batch; not derived."""

GROWTH_BITS = 8.0
"""The powers of two between 1 and the largest value of e4m3."""

PEER_BITS = {"weight": 4.0, "grad_output": 16.0}
"""How many powers of two a tensor's rms may differ from the rms of its peers in other blocks."""

ADAM_EPS = 1e-8
"""Below Adam's eps, a gradient no longer moves a weight by the learning rate."""

PERSISTENT_SCALING = ("delayed", "static")


@dataclass(frozen=True)
class TensorMeasurement:
    """The value that a rule measured for one tensor, and its thresholds."""

    value: float
    raise_at: float
    clear_at: float
    is_bad_above: bool = True
    """Whether values above `raise_at` are bad; else values below it."""
    since: int | None = None
    """The first bad step, if it is before this sample."""
    level: float | None = None
    """The level that the rule compares with earlier samples, if it may change for good."""
    usual: float | None = None
    """The level of earlier samples."""

    @property
    def is_bad(self) -> bool:
        return self.value > self.raise_at if self.is_bad_above else self.value < self.raise_at

    @property
    def is_near(self) -> bool:
        """Whether the value is still on the bad side of `clear_at`."""
        return self.value > self.clear_at if self.is_bad_above else self.value < self.clear_at

    @property
    def excess(self) -> float:
        return self.value - self.raise_at if self.is_bad_above else self.raise_at - self.value


@dataclass(frozen=True)
class AlarmRule:
    """A rule of the alarms. It alarms after `bad_samples` bad samples in a row, and clears after as many good ones."""

    name: str
    measure: Callable[[TensorStatistics, Sample], TensorMeasurement | None]
    text: str
    """The sentence of its alarm; a format string of `value`, `threshold` and `rank`."""
    bad_samples: int = 1
    spreads: bool = True
    """Whether a bad tensor makes other tensors of the step bad."""
    suggest: Callable[[TensorStatistics, Sample], tuple[dict[str, Any], ...]] = lambda tensor, sample: ()

    @property
    def has_remedies(self) -> bool:
        """Whether another recipe may help."""
        return self.suggest is suggest_recipes


def _measure_nonfinite(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    count = tensor.nonfinite
    return None if count is None else TensorMeasurement(math.inf if math.isnan(count) else count, 0, 0)


def _measure_ranks(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    is_outlier = tensor.position in sample.outlier_ranks
    return TensorMeasurement(float(is_outlier), 0, 0) if tensor.key.operand == "weight" else None


def _get_cast(tensor: TensorStatistics) -> tuple[Float8Format, float] | None:
    """Return the format and SQNR of a cast, or None if the tensor has no cast or only zeros."""
    fmt = parse_format(tensor.entry.get("dtype"))
    if fmt is None or tensor.is_result or tensor.sqnr_db is None or not tensor.rms or tensor.nonfinite:
        return None
    return fmt, tensor.sqnr_db


def _measure_codes(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the SQNR, which is bad below the bound for rounding at the recorded scale."""
    cast = _get_cast(tensor)
    if cast is None or tensor.saturated or tensor.scale_max is None or not tensor.rms:
        return None
    bound = compute_cast_bound_db(cast[0], tensor.rms, tensor.scale_max) - 0.1  # sums in float32
    return TensorMeasurement(cast[1], bound, bound, is_bad_above=False)


def _measure_saturation(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the saturated share. A dynamic scale clips nothing."""
    if _get_cast(tensor) is None or tensor.saturated is None or _is_persistent(tensor):
        return None
    return TensorMeasurement(tensor.saturated, 0, 0)


def _measure_clipping(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the saturated share under a persistent scale, which is bad if it costs more than rounding can."""
    cast = _get_cast(tensor)
    if cast is None or tensor.saturated is None or not _is_persistent(tensor):
        return None
    harms = cast[1] < compute_rounding_bound_db(cast[0])
    return TensorMeasurement(tensor.saturated if harms else 0.0, 0, 0)


def _is_persistent(tensor: TensorStatistics) -> bool:
    scaling = tensor.entry.get("scaling")
    return str(scaling or "delayed").startswith(PERSISTENT_SCALING)


def _measure_underflow(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    cast = _get_cast(tensor)
    if cast is None or tensor.underflow is None:
        return None
    # Gradients are judged by e5m2's bound, which recipes accept for them: they are distributed wider than a Gaussian.
    fmt = E5M2 if tensor.key.operand == "grad_output" else cast[0]
    raise_at = compute_underflow_share(compute_rounding_bound_db(fmt))
    return TensorMeasurement(tensor.underflow, raise_at, raise_at / 2)


def _measure_sqnr(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    cast = _get_cast(tensor)
    if cast is None or tensor.saturated:
        return None
    bound = compute_rounding_bound_db(cast[0])
    return TensorMeasurement(cast[1], bound - 0.1, bound + BIT_DB / 2, is_bad_above=False)


def _measure_zero(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure whether all elements are zero. Gradients may be zero at first, if weights are initialized to zero."""
    if tensor.amax is None or tensor.nonfinite or not tensor.numel:
        return None
    return TensorMeasurement(float(tensor.amax == 0), 0, 0)


DEAD_SHARE = 1 / 64
"""The share of one of 64 experts."""


def _measure_dead(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure how much more of a weight's gradient is zero than before: rows, columns or experts that no token uses.

    Linears whose operands usually have exact zeros, as after ReLU or dropout, are not judged, because their units idle
    by chance.
    """
    zeros, earlier_samples = tensor.zeros, sample.list_earlier(tensor)
    if tensor.key.operand != "grad_weight" or zeros is None or zeros == 1 or not earlier_samples:
        return None
    if not tensor.entry.get("experts") and any(
        _get_usual_zeros(operand, sample) > DEAD_SHARE for operand in _list_operands(tensor, sample)
    ):
        return None
    return TensorMeasurement(zeros - _get_usual_zeros(tensor, sample), DEAD_SHARE, DEAD_SHARE / 2)


def _get_usual_zeros(tensor: TensorStatistics, sample: Sample) -> float:
    """Return the largest share of zeros in the older half of the earlier samples."""
    earlier_samples = sample.list_earlier(tensor)
    return max((earlier.zeros or 0.0 for earlier in earlier_samples[: len(earlier_samples) // 2 + 1]), default=0.0)


def _list_operands(result: TensorStatistics, sample: Sample) -> list[TensorStatistics]:
    """List the casts of a result's operands."""
    operands = sample.by_layer[result.key.layer]
    return [cast for name, _ in MATMULS[result.key.operand] for cast in operands.get(name, [])]


def _measure_jump(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the powers of two between a level and all of its last four.

    They are bad beyond `JUMP_BITS` and beyond six standard deviations of the level's changes. The level of a weight or
    an activation is its amax. The level of a gradient is its rms, with `GRADIENT_JUMP_BITS`, and the sample before must
    have jumped too, because gradients depend on the batch. A weight with fewer than three earlier samples is compared
    with those and jumps by `GROWTH_BITS`: a learning rate that is far too high acts in the first step.
    """
    is_gradient = tensor.key.operand.startswith("grad")
    earlier_samples = sample.list_earlier(tensor)
    levels = [sampled.get_log2("rms" if is_gradient else "amax") for sampled in [*earlier_samples[-8:], tensor]]
    recent, past = (levels[-2:], levels[:-2]) if is_gradient else (levels[-1:], levels[:-1])
    usual = [level for level in past if level is not None]
    is_early = len(usual) < 3
    if None in recent or tensor.nonfinite or not usual or (is_early and tensor.key.operand != "weight"):
        return None
    raise_at = GROWTH_BITS
    if not is_early:
        steps = [abs(b - a) for a, b in zip(usual, usual[1:], strict=False)]
        raise_at = max(GRADIENT_JUMP_BITS if is_gradient else JUMP_BITS, 6 * 1.4826 * statistics.median(steps))
    low, high = min(usual[-4:]), max(usual[-4:])
    recent_levels = [level for level in recent if level is not None]
    value = max(min(recent_levels) - high, low - max(recent_levels), 0.0)
    since = earlier_samples[-1].step if is_gradient else tensor.step
    return TensorMeasurement(
        value, raise_at, raise_at / 2, since=since, level=recent_levels[-1], usual=statistics.median(usual[-4:])
    )


def _measure_growth(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the powers of two that an rms grew by in the last 8 or 16 samples, if the growth does not slow down.

    Gradients are not judged: they may recover from small values.
    """
    if tensor.key.operand not in ("weight", "input") or tensor.nonfinite:
        return None
    levels = [sampled.get_log2("rms") for sampled in [*sample.list_earlier(tensor), tensor]]
    growths = [_sum_steady_growth(levels[-length - 1 :]) for length in (8, 16) if len(levels) > length]
    return TensorMeasurement(max(growths), GROWTH_BITS, GROWTH_BITS / 2) if growths else None


def _sum_steady_growth(levels: list[float | None]) -> float:
    """Return the growth, or 0 if the later half grew less than three quarters of the earlier half."""
    observed = [level for level in levels if level is not None]
    if len(observed) < len(levels):
        return 0.0
    half = len(observed) // 2
    early, late = observed[half] - observed[0], observed[-1] - observed[half]
    rises = sum(b > a for a, b in zip(observed, observed[1:], strict=False))
    return early + late if early > 0 and late >= 0.75 * early and rises >= len(observed) - 2 else 0.0


def _measure_peers(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the powers of two between an rms and the median rms of the same tensor in other blocks."""
    raise_at, level = PEER_BITS.get(tensor.key.operand), tensor.get_log2("rms")
    levels = [peer.get_log2("rms") for peer in sample.by_peer_key[tensor.peer_key] if peer is not tensor]
    peer_levels = [peer_level for peer_level in levels if peer_level is not None]
    if raise_at is None or level is None or tensor.nonfinite or len(peer_levels) < 3:
        return None
    return TensorMeasurement(abs(level - statistics.median(peer_levels)), raise_at, raise_at / 2)


def _measure_result(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure a result's SQNR over some rows, which is bad three bits below what its operands' errors explain."""
    if not tensor.is_result or tensor.sqnr_db is None or not tensor.rms or tensor.nonfinite:
        return None
    left, right = (_find_worst_cast(sample, tensor.key.layer, name) for name, _ in MATMULS[tensor.key.operand])
    if left is None or right is None or not (tensor.numel and left.numel and right.numel and left.rms and right.rms):
        return None
    contracted = math.sqrt(left.numel * right.numel / tensor.numel)
    uncancelled = min(tensor.rms**2 / (contracted * (left.rms * right.rms) ** 2), 1.0)
    expected = compute_result_db(_get_sqnr_db(left), _get_sqnr_db(right), uncancelled)
    raise_at = min(expected, 40.0) - 3 * BIT_DB
    return TensorMeasurement(tensor.sqnr_db, raise_at, raise_at + BIT_DB, is_bad_above=False)


def _measure_sums(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the SQNR of a GPU's sums, with the setting in use, against the casts and rounding to bfloat16."""
    sums = sample.sums.get(tensor.position)
    if sums is None:
        return None
    bound = sums.compute_bound_db()
    return TensorMeasurement(
        sums.choose_sums_db(use_fast_accum=bool(tensor.entry.get("use_fast_accum"))),
        bound,
        bound + BIT_DB,
        is_bad_above=False,
    )


def _find_worst_cast(sample: Sample, layer: str, name: str) -> TensorStatistics | None:
    return min(sample.by_layer[layer].get(name, []), key=_get_sqnr_db, default=None)


def _get_sqnr_db(operand: TensorStatistics) -> float:
    return math.inf if operand.sqnr_db is None else operand.sqnr_db


def _measure_vanishing(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure the rms of a weight's gradient, if it is the largest of all weights."""
    if tensor.key.operand != "grad_weight" or not tensor.rms:
        return None
    rms = [grad.rms or 0.0 for grad in sample.tensors if grad.key.operand == "grad_weight"]
    return TensorMeasurement(tensor.rms, ADAM_EPS, 2 * ADAM_EPS, is_bad_above=False) if tensor.rms == max(rms) else None


def _measure_unchanged(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    """Measure whether a weight with a gradient stays bit-identical while others change: no optimizer holds it."""
    earlier_samples = sample.list_earlier(tensor)
    if tensor.key.operand != "weight" or not earlier_samples or not _has_gradient(tensor, sample):
        return None
    layer, candidates = tensor.key.layer, sample.tensors
    weights = [weight for weight in candidates if weight.key.operand == "weight" and weight.key.layer != layer]
    any_changed = any(_has_gradient(weight, sample) and not _is_unchanged(weight, sample) for weight in weights)
    return TensorMeasurement(float(any_changed and _is_unchanged(tensor, sample)), 0, 0)


def _is_unchanged(tensor: TensorStatistics, sample: Sample) -> bool:
    earlier_samples = sample.list_earlier(tensor)
    return bool(earlier_samples) and all(
        getattr(earlier_samples[-1], name) == getattr(tensor, name) for name in ("amax", "rms", "smallest")
    )


def _has_gradient(weight: TensorStatistics, sample: Sample) -> bool:
    return any(grad.amax for grad in sample.by_layer[weight.key.layer].get("grad_weight", []))


def _measure_mismatch(tensor: TensorStatistics, sample: Sample) -> TensorMeasurement | None:
    error = tensor.token_mult_prob_error
    return None if error is None else TensorMeasurement(error, MISMATCH_BOUNDS[1], MISMATCH_BOUNDS[0])


RESULT_TEXT = "{value:.1f} dB against high precision; the errors of its operands explain only {threshold:.1f}"
SUMS_COST_TEXT = "{value:.1f} dB of the GPU's sums, below {threshold:.1f} of its casts or of rounding to bfloat16"
CLIPPED_TEXT = "{value:.2%} of the elements are clipped"
WRONG_CODES_TEXT = "{value:.1f} dB; no rounding at this scale is below {threshold:.1f}: codes or scale are wrong"
LOW_SQNR_TEXT = "{value:.1f} dB; rounding alone leaves at least {threshold:.1f}"
UNDERFLOW_TEXT = "{value:.1%} of the elements become zero, above {threshold:.1%}"
MISMATCH_TEXT = "mean exp|difference| of log probabilities to the trainer's is {value:.3f}, above {threshold:.2f}"
PEERS_TEXT = "rms is 2^{value:.1f} from that of other blocks, above 2^{threshold:.1f}"
DEAD_TEXT = "{value:.1%} more of the gradient is exactly zero than before"
VANISHING_TEXT = "rms {value:.1e} is below the eps of Adam, {threshold:.0e}"
UNCHANGED_TEXT = "did not change while other weights did: no optimizer holds it"

ALARM_RULES = (
    AlarmRule("nonfinite", _measure_nonfinite, "elements that are not finite: {value:g}"),
    AlarmRule("ranks", _measure_ranks, "differs on rank {rank} from its replicas"),
    AlarmRule("codes", _measure_codes, WRONG_CODES_TEXT),
    AlarmRule("saturation", _measure_saturation, CLIPPED_TEXT, suggest=suggest_recipes),
    AlarmRule("saturation", _measure_clipping, CLIPPED_TEXT, bad_samples=3, suggest=suggest_recipes),
    AlarmRule("result", _measure_result, RESULT_TEXT, bad_samples=2),
    AlarmRule("zero", _measure_zero, "is all zeros", bad_samples=2),
    AlarmRule("sqnr", _measure_sqnr, LOW_SQNR_TEXT, bad_samples=2, spreads=False, suggest=suggest_recipes),
    AlarmRule("underflow", _measure_underflow, UNDERFLOW_TEXT, bad_samples=2, spreads=False, suggest=suggest_recipes),
    AlarmRule("sums", _measure_sums, SUMS_COST_TEXT, spreads=False, suggest=suggest_accumulation),
    AlarmRule("jump", _measure_jump, "changed by 2^{value:.1f}, above 2^{threshold:.1f}"),
    AlarmRule("growth", _measure_growth, "rms grew by 2^{value:.1f} and does not slow down"),
    AlarmRule("peers", _measure_peers, PEERS_TEXT, bad_samples=2, spreads=False),
    AlarmRule("dead", _measure_dead, DEAD_TEXT, bad_samples=3, spreads=False),
    AlarmRule("vanishing", _measure_vanishing, VANISHING_TEXT, bad_samples=2, spreads=False),
    AlarmRule("mismatch", _measure_mismatch, MISMATCH_TEXT, spreads=False, suggest=suggest_same_codes),
    AlarmRule("unchanged", _measure_unchanged, UNCHANGED_TEXT, bad_samples=3, spreads=False),
)
"""A rule explains the rules after it: a value that is not finite explains a jump, not the reverse."""

REMEDIED_RULES = frozenset(rule.name for rule in ALARM_RULES if rule.has_remedies)
"""The rules whose cause another recipe may remove."""
