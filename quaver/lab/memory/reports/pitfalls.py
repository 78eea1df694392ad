"""Recognizes tensors that need not be saved for backward, from the rows of a report.

A rule reads rows only: a tensor's operator and operand, its shape and dtype, the mechanism that saved it, and its first
reader in backward. Rules do not depend on the model, the recipe or the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from quaver.lab.recorder.recorder import CAST_PREFIX
from quaver.lab.recorder.timeline_report import UNSHARDED_SUFFIX
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.torch_private.dispatch import OpOverload, OpOverloadPacket

Row = dict[str, Any]
"""A row of a report's `saved_for_backward` (docs/profiling.md). Unknown values are missing or None."""

_REDUCTIONS = frozenset(
    ("all", "amax", "amin", "aminmax", "any", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "norm", "prod")
    + ("std", "sum", "var")
)
_CONVERSIONS = frozenset(("_to_copy", "convert_element_type", "to"))
_LONGEST_NAME = 48
"""The most letters of an operator's name, since a fused kernel is named after all its operators."""


class SavedByRuns(NamedTuple):
    """The tensors that two runs save for backward."""

    same_run: Sequence[Row]
    """The rows of the run that the row in question belongs to."""
    other_run: Sequence[Row]
    """The rows of the run that it is compared with."""


def find_hint(row: Row, saved: SavedByRuns) -> str:
    """Return a hint that says how to avoid saving `row`, which is in `saved.same_run`; empty if no rule applies."""
    return next(filter(None, (pitfall(row, saved) for pitfall in PITFALLS)), "")


def shorten_operator(operator: str | None) -> str:
    """Return `abs` for "aten.abs", "aten.abs.out" and "quaver::amax (aten.abs)". Long names are shortened."""
    inner = strip_phase(operator)
    short = inner.split(".")[1] if "." in inner else inner
    return short if len(short) <= _LONGEST_NAME else short[:_LONGEST_NAME].rpartition("_")[0] + "..."


def strip_phase(operator: str | None) -> str:
    """Return the operator without the float8 phase around it."""
    name = operator or ""
    return name.partition(" (")[2].removesuffix(")") or name


def is_operator(name: str) -> bool:
    """Return whether this names an operator or a fused kernel, and not a parameter."""
    return name.startswith("fused_") or "::" in name or isinstance(_find_operator(name), (OpOverload, OpOverloadPacket))


def _hint_at_reduction(row: Row, saved: SavedByRuns) -> str:
    """Give a hint if a pointwise result is saved, but backward reads only a reduction of it."""
    first_use = row.get("first_use") or {}
    reader = shorten_operator(first_use.get("operator"))
    if not _is_pointwise(row["operator"]) or reader not in _REDUCTIONS:
        return ""
    sizes = [size for size in row["shape"] if size > 1]
    if len(sizes) < 2:
        return ""
    reductions = [
        reduction
        for reduction in saved.other_run
        if shorten_operator(reduction["operator"]) == reader and _has_same_operand(reduction, row)
    ]
    if reductions:
        cost_bytes = sum(reduction["bytes"] for reduction in reductions)
        return f"saving the {reader} instead, as the other run does, costs {format_bytes(cost_bytes)}"
    # A reduction removes at least one dim, at worst the smallest.
    most_bytes = prod(sizes) // min(sizes) * _get_itemsize(row["dtype"])
    return f"saving the {reader} instead would cost at most {format_bytes(most_bytes)}"


def _hint_at_unread(row: Row, saved: SavedByRuns) -> str:
    """Give a hint if a policy saves a tensor that backward does not read, because a later result is saved as well."""
    if row.get("saved_by") != "selective policy" or "first_use" not in row or row["first_use"] is not None:
        return ""
    return "no operator of the backward reads it: the policy need not save it"


def _hint_at_gathered_weight(row: Row, saved: SavedByRuns) -> str:
    if row["category"] != "gathered_weights":
        return ""
    return "a gathered weight; with parallelism.fsdp_reshard_after_forward always the backward gathers it again"


def _hint_at_result_of_weight(row: Row, saved: SavedByRuns) -> str:
    """Give a hint if a tensor as large as a gathered weight is computed from it. Backward gathers the weight anyway."""
    is_matrix = sum(size > 1 for size in row["shape"]) > 1  # excludes scales
    if not (row.get("of") or "").endswith(UNSHARDED_SUFFIX) or not is_matrix or not _keeps_shape(row["operator"]):
        return ""
    return "as many elements as the weight it is made of, which backward gathers anyway: compute it again there"


def _hint_at_copy(row: Row, saved: SavedByRuns) -> str:
    """Give a hint if a tensor is saved, and so are its float8 codes or a wider copy of it."""
    itemsize = _get_itemsize(row["dtype"])
    sources = (
        source for source in saved.same_run if _is_source(source, row) and _get_itemsize(source["dtype"]) != itemsize
    )
    source = next(sources, None)
    if source is None:
        return ""
    is_wider = itemsize > _get_itemsize(source["dtype"])
    if row["dtype"].startswith("float8") and not is_wider:
        input_saved = f"{source['dtype']} ({format_bytes(source['bytes'])})"
        return f"the input of the cast is saved, too, in {input_saved}: backward needs one of the two"
    if shorten_operator(row["operator"]) in _CONVERSIONS and is_wider:
        return f"a copy in {row['dtype']} of a {source['dtype']} tensor that is saved, too: convert it when it is read"
    return ""


PITFALLS: tuple[Callable[[Row, SavedByRuns], str], ...] = (
    _hint_at_reduction,
    _hint_at_unread,
    _hint_at_gathered_weight,
    _hint_at_result_of_weight,
    _hint_at_copy,
)
"""The rules. Each returns a hint or an empty string, and the first hint is used."""


def _has_same_operand(reduction: Row, row: Row) -> bool:
    """Return whether `reduction` was computed from `row`'s operand, or from a result like `row`, by its columns."""
    operands = filter(None, (row.get("of"), row["operator"]))
    return reduction["module"] == row["module"] and reduction.get("of") in operands


def _is_source(source: Row, row: Row) -> bool:
    is_named = source["operator"] is not None and source["operator"] == row.get("of")
    return is_named and source["module"] == row["module"] and prod(source["shape"]) == prod(row["shape"])


def _is_pointwise(operator: str | None) -> bool:
    overloads = _find_operator(operator)
    return torch.Tag.pointwise in getattr(getattr(overloads, "default", overloads), "tags", ())


def _find_operator(name: str | None) -> Any:
    operator: Any = torch.ops
    for part in strip_phase(name).split("."):
        operator = getattr(operator, part, None)
    return operator


def _keeps_shape(operator: str | None) -> bool:
    is_cast = strip_phase(operator).startswith(CAST_PREFIX)
    return is_cast or _is_pointwise(operator) or shorten_operator(operator) in _CONVERSIONS


def _get_itemsize(dtype: str) -> int:
    """Return the bytes of an element; 1 for a storage without a tensor, whose row has no dtype."""
    return getattr(torch, dtype).itemsize if dtype else 1
