"""Alarms over a record, sample after sample: one for each cause, and one more line when it has ended.

    alarms = Alarms()
    for header, sample in record:
        for event in alarms.update(header, sample):
            print(event.message)

It reads dictionaries in the form of `numerics.jsonl`, so it gives the same alarms beside a run and over its record.

[Note: one alarm per cause] What is bad at the first tensor that a step computes is soon bad at those behind it. Of the
tensors that turn bad in one sample the first one alarms: weights, then the forward in its order, then the backward in
its. The others, and those of the next `FOLLOWS` samples, follow it, and raise no alarm as long as they are bad.
An alarm is cleared when no rule that spoke of its tensor does so any more. Of a jump that is also so where the tensor
stays where it jumped to: that is its new level, which `Cleared.stays` says. A value that is not finite always alarms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quaver.numerics.remedies import said
from quaver.numerics.rules import RULES, Measure, Rule
from quaver.numerics.seen import History, Sample, TensorStatistics

ACTIONS = ("log", "callback", "stop", "fallback")

FOLLOWS = 8
"""Samples after an alarm in which other tensors turn bad because of it, through the weights."""


@dataclass(frozen=True)
class Alarm:
    """One cause, found at `step`; `since` is the first step that was bad."""

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
    """How many other tensors it made bad in the same sample."""
    action: str = "log"

    def to_dict(self) -> dict[str, Any]:
        """The line of a record."""
        return {"kind": "alarm", **vars(self), "remedies": list(self.remedies)}


@dataclass(frozen=True)
class Cleared:
    """The cause of an alarm has ended."""

    step: int
    rule: str
    layer: str
    operand: str
    stays: bool = False
    """Whether a tensor that jumped did not come back: where it is now is its usual level from now on."""

    @property
    def message(self) -> str:
        """One line, as an alarm's."""
        how = "has not come back; this is its new level" if self.stays else "has ended"
        return f"{self.layer} {self.operand}: {self.rule} {how}"

    def to_dict(self) -> dict[str, Any]:
        """The line of a record."""
        return {"kind": "cleared", **vars(self)}


Key = tuple[str, str, str]
"""Rule, layer and operand."""


@dataclass
class _State:
    """The history of one rule on one tensor."""

    bad: int = 0
    """Samples in a row."""
    good: int = 0
    since: int = 0
    usual: float | None = None
    """The level before it was bad (`Measure.usual`)."""
    cause: Key | None = None
    """The alarm that it raised or follows, while it is bad."""


@dataclass(frozen=True)
class _Finding:
    key: Key
    rule: Rule
    seen: TensorStatistics
    measure: Measure

    @property
    def order(self) -> tuple[bool, tuple[int, int, int], int]:
        return self.rule.name != "nonfinite", self.seen.order, RULES.index(self.rule)


@dataclass
class Alarms:
    """Raises and clears alarms.

    Args:
        rules: those to apply; `RULES` has all.
        action: what an alarm says is done about it.
    """

    rules: Sequence[Rule] = RULES
    action: str = "log"
    _history: History = field(default_factory=History, repr=False)
    _states: dict[Key, _State] = field(default_factory=dict, repr=False)
    _count: int = field(default=0, repr=False)
    _recent: tuple[Key, int] | None = field(default=None, repr=False)
    """The last alarm of a rule that spreads, and the sample, by number, that raised it."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action: expected one of {', '.join(ACTIONS)}, got {self.action!r}")

    def update(self, header: Mapping[str, Any], sample: Mapping[str, Any]) -> list[Alarm | Cleared]:
        """The alarms that `sample` raises and those that it clears.

        Args:
            header: the last header before the sample.
            sample: its line of the record, NaN and infinities as strings or as floats.
        Raises:
            KeyError: a line has not the form of schema 1.
        """
        read = self._history.read(header, sample)
        self._count += 1
        found = self._measure(read)
        followers_first = sorted(found, key=lambda key: key in self.active)
        cleared = [event for key in followers_first if (event := self._clear(key, found[key][1], read.step))]
        turned = []
        for key, (rule, finding) in found.items():
            if finding is not None and self._turns_bad(key, rule, finding, read.step):
                turned.append(finding)
        return [*cleared, *self._raise(sorted(turned, key=lambda each: each.order), read)]

    @property
    def active(self) -> list[Key]:
        """The alarms that last."""
        return [key for key, state in self._states.items() if state.cause == key]

    @property
    def suspects(self) -> set[str]:
        """The layers that are bad, but not for long enough, by a rule with remedies: what-if would have numbers."""
        remedied = {rule.name for rule in self.rules if rule.remedied}
        return {key[1] for key, state in self._states.items() if state.bad and key[0] in remedied and not state.cause}

    def _measure(self, sample: Sample) -> dict[Key, tuple[Rule, _Finding | None]]:
        """By key, the worst of the casts that a rule applies to."""
        found: dict[Key, tuple[Rule, _Finding | None]] = {}
        for seen in sample.seen:
            for rule in self.rules:
                measure = rule.measure(seen, sample)
                if measure is None:
                    continue
                key = rule.name, seen.key.layer, seen.key.operand
                worst = found[key][1] if key in found else None
                if worst is None or measure.excess > worst.measure.excess:
                    found[key] = rule, _Finding(key, rule, seen, measure)
        return found

    def _clear(self, key: Key, finding: _Finding | None, step: int) -> Cleared | None:
        """End what was good for as many samples as it had to be bad."""
        state = self._states.get(key)
        if state is None or state.cause is None or finding is None:
            return None
        state.good = 0 if finding.measure.is_near else state.good + 1
        is_cause = state.cause == key
        others = [name for name, other in self._states.items() if other.cause == key and name != key]
        if state.good < finding.rule.samples or (is_cause and any(name[1:] == key[1:] for name in others)):
            return None
        self._states[key] = _State()
        level, usual = finding.measure.level, state.usual
        stays = level is not None and usual is not None and abs(level - usual) > finding.measure.clear_at
        return Cleared(step, *key, stays) if is_cause else None

    def _turns_bad(self, key: Key, rule: Rule, finding: _Finding, step: int) -> bool:
        if not finding.measure.is_bad:
            if key in self._states:
                self._states[key].bad = 0
            return False
        state = self._states.setdefault(key, _State())
        if not state.bad:
            state.since = finding.measure.since or step
            state.usual = finding.measure.usual if state.cause is None else state.usual
        state.bad += 1
        return state.cause is None and state.bad >= rule.samples

    def _raise(self, turned: list[_Finding], sample: Sample) -> Iterable[Alarm]:
        """Alarms for the first of `turned`, of those that do not follow it, and so on."""
        while turned:
            first, *rest = turned
            lasting = self._explained(first)
            followers = [each for each in rest if lasting or _follows(each, first)]
            for each in (first, *followers):
                self._states[each.key].cause, self._states[each.key].good = lasting or first.key, 0
            if lasting is None:
                if first.rule.spreads:
                    self._recent = first.key, self._count
                yield self._alarm(first, len({each.seen.key[:2] for each in followers}), sample)
            turned = [each for each in rest if each not in followers]

    def _explained(self, finding: _Finding) -> Key | None:
        """The recent alarm that explains what turns bad now."""
        if self._recent is None or self._count - self._recent[1] > FOLLOWS:
            return None
        key = self._recent[0]
        is_harmed = key[0] == "jump" and finding.rule.remedied and finding.key[1:] == key[1:]  # lasts, and has remedies
        return None if is_harmed or finding.rule.name == "nonfinite" != key[0] else key

    def _alarm(self, finding: _Finding, followers: int, sample: Sample) -> Alarm:
        rule, seen, measure = finding.rule, finding.seen, finding.measure
        state = self._states[finding.key]
        helps = rule.remedies(seen, sample)
        rank = sample.ranks.get(seen.position) if rule.name == "ranks" else None
        what = rule.text.format(value=measure.value, threshold=measure.raise_at, rank=rank)
        where = f"{seen.key.layer} {seen.key.operand}"
        message = f"{where}: {what}, since step {state.since:,}"
        if followers:
            message += f"; {followers} more tensors followed"
        if said(helps):
            message += f". {said(helps)}"
        values = float(measure.value), float(measure.raise_at)
        about = sample.step, state.since, rule.name, seen.key.layer, seen.key.operand
        return Alarm(*about, rank, *values, message, helps, followers, self.action)


def _follows(finding: _Finding, first: _Finding) -> bool:
    """Whether one finding of a sample is a consequence of the first."""
    same_tensor = finding.key[1:] == first.key[1:]
    return first.rule.spreads or same_tensor or finding.rule is first.rule
