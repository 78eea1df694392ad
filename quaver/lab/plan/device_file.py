"""Reads the specification of a GPU that quaver does not know from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from quaver.roofline.device_specs import DEVICE_SPECS, DeviceSpec
from quaver.runtime.errors import InputError

_NUMBER_FIELDS = tuple(field.name for field in fields(DeviceSpec) if field.name != "name")
_REQUIRED_FIELDS = tuple(
    field.name for field in fields(DeviceSpec) if field.default is MISSING and field.name != "float8_tflops"
)
_INTEGER_FIELDS = ("multiprocessors", "block_length", "compute_capability")


def read_device_spec(path: Path) -> DeviceSpec:
    """Read a `DeviceSpec` from a TOML file with its fields. Without float8_tflops the device does not multiply float8.

    Raises:
        InputError: the file is not TOML, a field is missing or unknown, a number is not above 0, or the name
            belongs to a device whose measured rates quaver knows; or the file cannot be read.
    """
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--spec {path}: expected TOML: {error}") from error
    except OSError as error:
        raise InputError(f"--spec {path}: expected a TOML file: {error.strerror}") from error
    known = ("name", *_NUMBER_FIELDS)
    if unknown := [name for name in values if name not in known]:
        raise InputError(f"--spec {path}: expected {', '.join(known)}, got {unknown[0]}")
    if missing := [name for name in _REQUIRED_FIELDS if name not in values]:
        raise InputError(f"--spec {path}: expected {', '.join(_REQUIRED_FIELDS)}; {missing[0]} is missing")
    if not isinstance(values["name"], str):
        raise InputError(f"--spec {path}: name: expected text, got {values['name']!r}")
    if values["name"].upper() in (spec.name.upper() for spec in DEVICE_SPECS):
        raise InputError(
            f"--spec {path}: name: expected the name of another GPU, got {values['name']!r}, whose rates are known"
        )
    for name in _NUMBER_FIELDS:
        value = values.get(name, 1)
        is_number = isinstance(value, int if name in _INTEGER_FIELDS else int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < float("inf")):
            raise InputError(f"--spec {path}: {name}: expected a number above 0, got {value!r}")
    return DeviceSpec(**{"float8_tflops": None, **values})
