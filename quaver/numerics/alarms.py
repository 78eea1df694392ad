"""Raises one alarm per cause, sample by sample, and says when the cause has ended.

    alarms = Alarms()
    for header, sample in record:
        for event in alarms.update(header, sample):
            print(event)

It reads dictionaries in the form of `numerics.jsonl`, so a run and its record give the same alarms.

A bad tensor soon makes the tensors computed after it bad. Among the tensors that turn bad in one sample, only the first
in the order of a step raises an alarm: weights, the forward, the backward. The other tensors, and tensors that turn bad
in the next `FOLLOWING_SAMPLES` samples, follow it and raise no alarm while they are bad. An alarm is cleared when no
rule is bad on its tensor any more, and its own rule on none of the followers. A jump also clears if the tensor stays at
its new level (`AlarmCleared.stays`). A value that is not finite raises an alarm unless it follows another such value.
After a change of the recipe under a cause, as by a fallback, followers that are still bad `FOLLOWING_SAMPLES` samples
after its alarm have another cause: the first of them raises the next alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quaver.numerics.alarm_rules import ALARM_RULES, AlarmRule, TensorMeasurement
from quaver.numerics.history import History, Sample, TensorStatistics
from quaver.numerics.remedies import describe_remedies

ALARM_ACTIONS = ("log", "callback", "stop", "fallback")

FOLLOWING_SAMPLES = 8
"""Samples after an alarm in which other tensors turn bad because of it, by way of the weights."""


@dataclass(frozen=True)
class Alarm:
    """One cause, detected at `step`; `since` is the first bad step.

    `layer` and `operand` name the tensor, and `value` is what `rule` measured. Each remedy has the key "recipe" and, if
    known, "sqnr_db", "gain_db" and "flops_share".
    """

    step: int
    since: int
    rule: str
    layer: str
    operand: str
    rank: int | None
    value: float
    threshold: float
    message: str
    remedies: tuple[dict[str, Any], ...]
    followers: int = 0
    """How many other tensors turned bad in the same sample because of it."""
    action: str = "log"

    def __str__(self) -> str:
        return f"step {self.step}: alarm: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return the alarm as a line of a record."""
        return {"kind": "alarm", **vars(self), "remedies": list(self.remedies)}


@dataclass(frozen=True)
class AlarmCleared:
    """The cause of an alarm has ended, and so has the alarm's rule on the tensors that followed."""

    step: int
    rule: str
    layer: str
    operand: str
    stays: bool = False
    """Whether a tensor that jumped did not come back, so that its new level is the usual one from now on."""

    @property
    def message(self) -> str:
        """A sentence like an alarm's."""
        outcome = "has not come back; this is its new level" if self.stays else "has ended"
        return f"{self.layer} {self.operand}: {self.rule} {outcome}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a line of a record."""
        return {"kind": "cleared", **vars(self)}


RuleKey = tuple[str, str, str]
"""Rule, layer and operand."""


@dataclass
class _AlarmState:
    """The history of one rule on one tensor."""

    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    since: int = 0
    usual: float | None = None
    """The level before the first bad sample (`TensorMeasurement.usual`)."""
    cause: RuleKey | None = None
    """The alarm that the tensor raised or follows while it is bad."""
    recipe: str | None = None
    """The recipe of the tensor when its alarm was raised."""


@dataclass(frozen=True)
class _Finding:
    key: RuleKey
    rule: AlarmRule
    rule_number: int
    tensor: TensorStatistics
    measurement: TensorMeasurement

    @property
    def order_key(self) -> tuple[bool, tuple[int, int, int], int]:
        return self.rule.name != "nonfinite", self.tensor.order_key, self.rule_number


@dataclass
class Alarms:
    """Raises and clears alarms.

    Args:
        rules: the rules to apply; all by default.
        action: what alarms say is done about them.
    """

    rules: Sequence[AlarmRule] = ALARM_RULES
    action: str = "log"
    _history: History = field(default_factory=History, repr=False)
    _states: dict[RuleKey, _AlarmState] = field(default_factory=dict, repr=False)
    _with_new_recipe: set[RuleKey] = field(default_factory=set, repr=False)
    """Alarms whose tensor has had another recipe since."""
    _sample_count: int = field(default=0, repr=False)
    _last_spreading: tuple[RuleKey, int] | None = field(default=None, repr=False)
    """The last alarm of a rule that spreads, and the number of its sample."""

    def __post_init__(self) -> None:
        if self.action not in ALARM_ACTIONS:
            raise ValueError(f"action: expected one of {', '.join(ALARM_ACTIONS)}, got {self.action!r}")

    def update(self, header: Mapping[str, Any], sample: Mapping[str, Any]) -> list[Alarm | AlarmCleared]:
        """Return the alarms that `sample` clears and raises.

        Args:
            header: the last header before the sample.
            sample: a line of the record, with NaN and infinities as strings or floats.
        Raises:
            KeyError: a line is not of schema 1.
        """
        current = self._history.read(header, sample)
        self._sample_count += 1
        self._forget_alarms_of_old_recipes(header)
        findings = self._measure(current)
        newly_bad = [finding for key, finding in findings.items() if self._count_bad_sample(key, finding, current.step)]
        raised = [*self._raise_alarms(sorted(newly_bad, key=lambda finding: finding.order_key), current)]
        followers_first = sorted(findings, key=lambda key: key in self.active)
        cleared = [event for key in followers_first if (event := self._clear_if_recovered(key, findings, current.step))]
        return [*cleared, *raised]

    @property
    def active(self) -> list[RuleKey]:
        """The alarms that have not been cleared."""
        return [key for key, state in self._states.items() if state.cause == key]

    @property
    def suspects(self) -> set[str]:
        """The layers that may soon alarm by a rule with remedies; their next sample should have what-if figures."""
        rules = {rule.name for rule in self.rules if rule.has_remedies}
        return {
            key[1] for key, state in self._states.items() if state.bad_in_a_row and key[0] in rules and not state.cause
        }

    def _forget_alarms_of_old_recipes(self, header: Mapping[str, Any]) -> None:
        """Forget alarms of tensors that have another recipe now or are not measured any more."""
        recipes = {(entry["layer"], entry["operand"]): entry.get("recipe") for entry in header["tensors"]}
        self._with_new_recipe |= {key for key in self.active if self._states[key].recipe != recipes.get(key[1:])}
        for state in self._states.values():
            if state.cause in self._with_new_recipe:
                state.cause = None

    def _measure(self, sample: Sample) -> dict[RuleKey, _Finding]:
        """Apply each rule to each tensor, and keep the worst cast of each operand."""
        findings: dict[RuleKey, _Finding] = {}
        for tensor in sample.tensors:
            for rule_number, rule in enumerate(self.rules):
                measurement = rule.measure(tensor, sample)
                if measurement is None:
                    continue
                key = rule.name, tensor.key.layer, tensor.key.operand
                worst = findings.get(key)
                if worst is None or measurement.excess > worst.measurement.excess:
                    findings[key] = _Finding(key, rule, rule_number, tensor, measurement)
        return findings

    def _clear_if_recovered(self, key: RuleKey, findings: Mapping[RuleKey, _Finding], step: int) -> AlarmCleared | None:
        """End a bad state after as many good samples in a row as the rule needs bad samples to alarm.

        A cause ends after its followers on its own tensor, and after its rule's followers in this sample.
        """
        state, finding = self._states.get(key), findings[key]
        if state is None or state.cause is None:
            return None
        state.good_in_a_row = 0 if finding.measurement.is_near else state.good_in_a_row + 1
        is_cause = state.cause == key
        followers = [name for name, follower in self._states.items() if follower.cause == key != name]
        bad_followers = [name for name in followers if name[1:] == key[1:] or (name[0] == key[0] and name in findings)]
        if state.good_in_a_row < finding.rule.bad_samples or (is_cause and bad_followers):
            return None
        self._states[key] = _AlarmState()
        level, usual = finding.measurement.level, state.usual
        stays = level is not None and usual is not None and abs(level - usual) > finding.measurement.clear_at
        return AlarmCleared(step, *key, stays) if is_cause else None

    def _count_bad_sample(self, key: RuleKey, finding: _Finding, step: int) -> bool:
        """Count a bad sample of one rule and tensor. Returns whether the tensor turns bad with it."""
        if not finding.measurement.is_bad:
            if key in self._states:
                self._states[key].bad_in_a_row = 0
            return False
        state = self._states.setdefault(key, _AlarmState())
        if not state.bad_in_a_row:
            state.since = finding.measurement.since or step
            state.usual = finding.measurement.usual if state.cause is None else state.usual
        state.bad_in_a_row += 1
        return state.cause is None and state.bad_in_a_row >= finding.rule.bad_samples

    def _raise_alarms(self, newly_bad: list[_Finding], sample: Sample) -> Iterable[Alarm]:
        """Raise an alarm for the first finding, then for the first that does not follow it, and so on."""
        while newly_bad:
            first, *rest = newly_bad
            cause = self._find_cause(first)
            followers = [finding for finding in rest if cause or _follows(finding, first)]
            for finding in (first, *followers):
                self._states[finding.key].cause, self._states[finding.key].good_in_a_row = cause or first.key, 0
            if cause is None:
                self._states[first.key].recipe = first.tensor.entry.get("recipe")
                self._with_new_recipe.discard(first.key)
                if first.rule.spreads:
                    self._last_spreading = first.key, self._sample_count
                yield self._make_alarm(first, len({follower.tensor.key[:2] for follower in followers}), sample)
            newly_bad = [finding for finding in rest if finding not in followers]

    def _find_cause(self, finding: _Finding) -> RuleKey | None:
        """Return the recent alarm that explains why a tensor turns bad now, or None."""
        if self._last_spreading is None or self._sample_count - self._last_spreading[1] > FOLLOWING_SAMPLES:
            return None
        key = self._last_spreading[0]
        needs_remedy = key[0] == "jump" and finding.rule.has_remedies and finding.key[1:] == key[1:]
        return None if needs_remedy or finding.rule.name == "nonfinite" != key[0] else key

    def _make_alarm(self, finding: _Finding, followers: int, sample: Sample) -> Alarm:
        rule, tensor, measurement = finding.rule, finding.tensor, finding.measurement
        state = self._states[finding.key]
        remedies = rule.suggest(tensor, sample)
        rank = sample.outlier_ranks.get(tensor.position) if rule.name == "ranks" else None
        text = rule.text.format(value=measurement.value, threshold=measurement.raise_at, rank=rank)
        message = f"{tensor.key.layer} {tensor.key.operand}: {text}, since step {state.since:,}"
        if followers:
            message += f"; {followers} more tensor{'s' if followers > 1 else ''} followed"
        if words := describe_remedies(remedies):
            message += f". {words}"
        values = float(measurement.value), float(measurement.raise_at)
        about = sample.step, state.since, rule.name, tensor.key.layer, tensor.key.operand
        return Alarm(*about, rank, *values, message, remedies, followers, self.action)


def _follows(finding: _Finding, first: _Finding) -> bool:
    """Return whether a finding of a sample is a consequence of the first one."""
    is_same_tensor = finding.key[1:] == first.key[1:]
    return first.rule.spreads or is_same_tensor or finding.rule is first.rule
