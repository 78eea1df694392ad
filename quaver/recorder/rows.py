"""Merges the rows of a memory report that belong to equal layers."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def merged_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows with "*" for each number in module names, equal ones merged, the largest first.

    Args:
        rows: with "module", "bytes", "count" and other columns; bytes and counts are summed.
    """
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        row = {name: _without_numbers(name, value) for name, value in row.items()}
        key = repr([(name, value) for name, value in row.items() if name not in ("bytes", "count")])
        if key in merged:
            merged[key]["bytes"] += row["bytes"]
            merged[key]["count"] += row["count"]
        else:
            merged[key] = row
    return sorted(merged.values(), key=lambda row: -row["bytes"])


def _without_numbers(name: str, value: Any) -> Any:
    if name in ("module", "of", "saved_in"):
        return _NUMBER.sub("*", value)
    if name == "first_use" and value is not None:
        return {**value, "module": _NUMBER.sub("*", value["module"])}
    return value
