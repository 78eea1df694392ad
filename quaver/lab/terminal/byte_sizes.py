"""Memory sizes as text: 80GiB, 80GB, 512MiB, 1.5 TiB, or plain bytes."""

from __future__ import annotations

import math
import re

from quaver.runtime.errors import InputError

BYTES_OF_UNIT = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
"""Bytes of each unit by its lower-case name. GB means 1000**3 bytes, and GiB, the unit of GPU data sheets, 1024**3."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)

DISPLAY_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def choose_unit(size_bytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the smallest unit in which `size_bytes`, in four digits, is below 1024."""
    return next(
        (unit for unit in reversed(DISPLAY_UNITS) if float(f"{size_bytes / unit[0]:.4g}") < 1024), DISPLAY_UNITS[0]
    )


def format_bytes(size_bytes: float) -> str:
    """Format a size with four digits, such as "3.25 GiB"."""
    unit_bytes, unit = choose_unit(size_bytes)
    return f"{size_bytes / unit_bytes:.4g} {unit}"


def format_change(change_bytes: float) -> str:
    """Format a difference of sizes with its sign, such as "-3.25 GiB"; "0 bytes" has none."""
    return f"{'+' if change_bytes > 0 else '-' if change_bytes < 0 else ''}{format_bytes(abs(change_bytes))}"


def parse_bytes(text: str, name: str = "size") -> int:
    """Parse a size in bytes, rounded down.

    Args:
        name: the name of the option, for the error.
    Raises:
        InputError: `text` is not a size above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    is_bits = match is not None and match[2][:1].isupper() and match[2].endswith("b")  # Gb, Gib
    unit_bytes = BYTES_OF_UNIT.get(match[2].lower(), 0) if match and not is_bits else 0
    size_bytes = float(match[1]) * unit_bytes if match else 0
    if not 1 <= size_bytes < math.inf:
        raise InputError(f"{name} must be a size above 0 such as 80GiB, 80GB, 512MiB or plain bytes, got {text!r}")
    return int(size_bytes)
