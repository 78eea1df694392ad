"""Whether a row of one comparison is that of another one, of a smaller case, again."""

from __future__ import annotations

import re

from quaver.memory.reports.compare import Difference

BLOCK = re.compile(r"model\.layers\.(\d+|\*)(\.|$)")
"""The name of a block of the model, or of a module in it."""

_ALIKE_FROM = 0.5
"""A row of another shape is still the one that is looked for if it has this share of its bytes per layer."""
_COMPILED = "compiled graph"


def is_alike(found: Difference, row: Difference) -> bool:
    """Whether `found` is `row` in a smaller case: a tensor with the same story, and as large."""
    is_same_kind = (found.category, found.dtype) == (row.category, row.dtype)
    if not is_same_kind or (found.difference_bytes > 0) != (row.difference_bytes > 0):
        return False
    if not (_is_made_alike(found, row) and _is_kept_alike(found, row) and _is_read_alike(found, row)):
        return False
    return found.shape == row.shape or abs(found.per_layer_bytes) >= _ALIKE_FROM * abs(row.per_layer_bytes)


def _is_made_alike(found: Difference, row: Difference) -> bool:
    if _parameter(found) != _parameter(row):
        return False
    if _are_of_both_worlds(found, row) or all(_is_fused(each.operator) for each in (found, row)):
        return found.source == row.source  # a compiler fuses other operators in another module
    return found.operator == row.operator


def _is_kept_alike(found: Difference, row: Difference) -> bool:
    """A compiler keeps what without it autograd or a checkpoint keeps, and nobody else."""
    keepers = {found.kept_by, row.kept_by}
    return len(keepers) == 1 or (_COMPILED in keepers and "other code" not in keepers)


def _is_read_alike(found: Difference, row: Difference) -> bool:
    if found.first_use is None or row.first_use is None:
        return found.first_use is row.first_use
    readers = [each["operator"] for each in (found.first_use, row.first_use)]
    return readers[0] == readers[1] or any(map(_is_fused, readers)) or _are_of_both_worlds(found, row)


def _are_of_both_worlds(found: Difference, row: Difference) -> bool:
    """Whether one is of compiled code, and the other of eager code."""
    return (found.kept_by == _COMPILED) != (row.kept_by == _COMPILED)


def _is_fused(operator: str | None) -> bool:
    return (operator or "").startswith("fused_")


def _parameter(row: Difference) -> str:
    """The parameter that the row was made of, without its layer; empty for something else."""
    name = row.of.removesuffix(", unsharded")
    return BLOCK.sub(r"model.layers.*\2", name) if name.endswith(".weight") else ""
