"""Converts and checks the fields of configs."""

from __future__ import annotations

import enum
from dataclasses import is_dataclass

from quaver.foreign.torchao import convert_from_torchao


def convert_field(config: object, name: str, expected: type) -> None:
    """Replace torchao's counterpart of a field, or a dict of its fields, by an instance of `expected`.

    Raises:
        ValueError: the field then has another type.
    """
    value = convert_from_torchao(getattr(config, name), expected)
    if isinstance(value, dict) and is_dataclass(expected):
        value = expected(**value)
    object.__setattr__(config, name, value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        hint = _suggest_member(expected, value) if issubclass(expected, enum.Enum) else ""
        raise ValueError(f"{name}: expected {expected.__name__}, got {value!r}{hint}")


def _suggest_member(enum_type: type[enum.Enum], name: object) -> str:
    members = [member for member in enum_type if name in (member.name, member.name.lower(), member.value)]
    return f"; write {members[0]}" if members else ""


def check_field(is_valid: bool, name: str, expected: str, value: object) -> None:
    """Raise ValueError about the field `name` unless `is_valid`."""
    if not is_valid:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
