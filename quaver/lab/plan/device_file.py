"""Reads the specification of a GPU that quaver does not know from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from quaver.lab.settings.fields import require
from quaver.roofline.device_specs import DEVICE_SPECS, DeviceSpec
from quaver.runtime.errors import InputError

_FIELD_BOUNDS: dict[str, tuple[float, float]] = {
    "bfloat16_tflops": (0.1, 1e6),
    "float8_tflops": (0.1, 1e6),
    "memory_gb_per_s": (1.0, 1e6),
    "memory_gb": (0.1, 1e6),
    "multiprocessors": (1, 100_000),
    "link_gb_per_s": (0.1, 1e6),
    "compute_capability": (10, 1000),
}
"""The least and the largest value of each number. A value outside has a wrong unit or exponent: no GPU comes near.
Integer bounds belong to integers."""
_BLOCK_LENGTHS = (32, 128)
_REQUIRED_FIELDS = tuple(
    field.name for field in fields(DeviceSpec) if field.default is MISSING and field.name != "float8_tflops"
)


def read_device_spec(path: Path) -> DeviceSpec:
    """Read a `DeviceSpec` from a TOML file with its fields. Without float8_tflops the device does not multiply float8.

    Raises:
        InputError: the file is not TOML, a field is missing or unknown, a number is no plausible one, or the name
            belongs to a device whose measured rates quaver knows; or the file cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a FIFO would block
        raise InputError(f"--spec {path}: expected a TOML file, which is a regular file")
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--spec {path}: expected TOML: {error}") from error
    except OSError as error:
        raise InputError(f"--spec {path}: expected a TOML file: {error.strerror}") from error
    known = [field.name for field in fields(DeviceSpec)]
    if unknown := [name for name in values if name not in known]:
        raise InputError(f"--spec {path}: expected {', '.join(known)}, got {unknown[0]}")
    if missing := [name for name in _REQUIRED_FIELDS if name not in values]:
        raise InputError(f"--spec {path}: expected {', '.join(_REQUIRED_FIELDS)}; {missing[0]} is missing")
    name = values["name"]
    is_printable = isinstance(name, str) and name.strip() != "" and name.isprintable()
    require(is_printable, f"--spec {path}: name", "printable text", name)
    is_known = name.upper() in (spec.name.upper() for spec in DEVICE_SPECS)
    require(not is_known, f"--spec {path}: name", "that of a GPU whose rates quaver does not know", name)
    for field, (least, largest) in _FIELD_BOUNDS.items():
        value = values.get(field, least)
        kind, kinds = ("an integer", int) if isinstance(least, int) else ("a number", int | float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        expected = f"{kind} of {least:g} to {largest:,.0f}"
        require(is_number and least <= value <= largest, f"--spec {path}: {field}", expected, value)
    length = values.get("block_length", 32)
    require(length in _BLOCK_LENGTHS, f"--spec {path}: block_length", "one of 32, 128", length)
    return DeviceSpec(**{"float8_tflops": None, **values})
