"""Reads the alarms of a record for a report."""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT
from quaver.numerics.record import Record
from quaver.runtime.errors import InputError


class AlarmFields(TypedDict):
    """The fields that an alarm must have."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    since: int
    rule: str
    layer: str | None
    operand: str | None
    message: str
    remedies: NotRequired[list[dict[str, Any]] | None]


class AlarmEnd(TypedDict):
    """The end of an alarm's cause."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    step: int
    rule: str
    layer: str | None
    operand: str | None


_ALARM_ADAPTER = TypeAdapter(AlarmFields)
_END_ADAPTER = TypeAdapter(AlarmEnd)


def read_alarms(record: Record, where: str) -> list[dict[str, Any]]:
    """Return the alarms in order, ready for JSON. "until" is the step at which the cause had ended, or None.

    Args:
        where: the name of the file in errors.
    Raises:
        InputError: an alarm lacks a field.
    """
    alarms: list[dict[str, Any]] = []
    for line in record.alarms:
        try:
            if line["kind"] == "alarm":
                _ALARM_ADAPTER.validate_python(line)
                alarms.append(_make_row(line))
            else:
                _END_ADAPTER.validate_python(line)
                _mark_ended(alarms, line)
        except ValidationError as error:
            field = error.errors()[0]["loc"][0]
            raise InputError(
                f"the alarm of step {line['step']} in {where} has no proper {field!r}; remove its line"
            ) from None
    return alarms


def _mark_ended(alarms: list[dict[str, Any]], end: dict[str, Any]) -> None:
    for alarm in alarms:
        if alarm["until"] is None and all(alarm[name] == end[name] for name in ("rule", "layer", "operand")):
            alarm["until"] = end["step"]


def _make_row(line: dict[str, Any]) -> dict[str, Any]:
    names = ("step", "since", "rule", "layer", "operand", "message", "rank", "action")
    numbers = {name: _format_number(line.get(name)) for name in ("value", "threshold")}
    remedies = [_format_remedy(remedy) for remedy in line.get("remedies") or []]
    return {name: line.get(name) for name in names} | numbers | {"remedies": remedies, "until": None}


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "" if value is None else str(value)


def _format_remedy(remedy: dict[str, Any]) -> str:
    """Format a remedy: "rowwise: 27.1 dB, +14.0 dB" or "high precision: 0.8% of the FLOPs"."""
    forms = {"sqnr_db": "{:.1f} dB", "gain_db": "{:+.1f} dB", "flops_share": "{:.1%} of the FLOPs"}
    known = [(form, remedy.get(name)) for name, form in forms.items()]
    numbers = ", ".join(form.format(value) for form, value in known if isinstance(value, int | float))
    return ": ".join(filter(None, [str(remedy.get("recipe", "")), numbers]))
