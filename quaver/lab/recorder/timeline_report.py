"""The report of a recording: bytes by category after each event, and tables at the two peaks.

The peaks are the most bytes alive and the most bytes saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

from quaver.lab.recorder.recorder import CATEGORIES, Allocation, Recorder
from quaver.runtime.module_names import mask_layer_numbers

SCHEMA = 4

State = dict[Allocation, tuple[int, int]]
"""Live allocations: bytes, and how many times autograd has saved each."""

COMPILED_GRAPH = "compiled graph"
"""The saver of the tensors that a compiled forward returns for its backward."""

UNSHARDED_SUFFIX = ", unsharded"
"""Follows the parameter's name where an operand is its gathered weight."""

NOT_FOR_BACKWARD = ("parameters", "gradients", "optimizer_state", "persistent_scales", "inputs")
"""Categories that would be alive even if autograd did not save them."""


def make_report(recorder: Recorder, note: str = "") -> dict[str, Any]:
    """Return the report of a recording.

    Args:
        note: the reason why the recording saw no operators, if so. The report then has no timeline and no peak.
    """
    timeline = list(_iter_timeline(recorder))
    totals = [sum(row[2:]) for row in timeline]
    saved_event = _find_saved_peak(recorder)
    peak_event = _find_maximum(totals)
    rows = _merge(
        _make_saved_row(allocation, size_bytes, save_count, recorder.modules.compiled)
        for allocation, (size_bytes, save_count) in _replay(recorder, saved_event).items()
        if _is_saved(allocation, save_count)
    )
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "exact": not note,
        "note": note,
        "peak_bytes": totals[peak_event],
        "peak_event": peak_event,
        "resident_bytes": dict(zip(CATEGORIES, timeline[0][2:], strict=True)),
        "at_peak": _merge(_make_row(allocation, *state) for allocation, state in _replay(recorder, peak_event).items()),
        "saved_bytes": sum(row["bytes"] for row in rows if row["category"] not in NOT_FOR_BACKWARD),
        "saved_event": saved_event,
        "saved_for_backward": rows,
        "spans": _list_spans(recorder),
        "columns": ["event", "t_us", *CATEGORIES],
        "timeline": timeline,
    }
    if note:
        report |= dict.fromkeys(("peak_bytes", "peak_event", "saved_bytes", "saved_event"))
        report |= {"at_peak": [], "spans": [], "timeline": []}
    return report


def get_category(allocation: Allocation, save_count: int) -> str:
    """Return the category of an allocation while autograd has saved it `save_count` times."""
    if allocation.category is not None:
        return allocation.category
    if _is_saved(allocation, save_count):
        return "saved_activations"
    return "communication" if allocation.is_collective_buffer else "temporaries"


def _is_saved(allocation: Allocation, save_count: int) -> bool:
    return save_count > 0 or allocation.held_from_forward


def _iter_timeline(recorder: Recorder) -> Iterator[list[Any]]:
    """Yield [event, t_us, bytes of each category]. Event 0 is the beginning, event i follows the i-th log entry."""
    totals = dict.fromkeys(CATEGORIES, 0)
    state: State = {}
    for allocation, size_bytes in recorder.initial.items():
        state[allocation] = (size_bytes, 0)
        totals[get_category(allocation, 0)] += size_bytes
    yield [0, 0.0, *totals.values()]
    for event, (t_us, allocation, size_bytes, save_count) in enumerate(recorder.log, 1):
        before_bytes, before_count = state.get(allocation, (0, 0))
        totals[get_category(allocation, before_count)] -= before_bytes
        totals[get_category(allocation, save_count)] += size_bytes
        state[allocation] = (size_bytes, save_count)
        yield [event, round(t_us, 1), *totals.values()]


def _replay(recorder: Recorder, event: int) -> State:
    state: State = {allocation: (size_bytes, 0) for allocation, size_bytes in recorder.initial.items()}
    for entry in recorder.log[:event]:
        state[entry.allocation] = (entry.size_bytes, entry.save_count)
    return {allocation: now for allocation, now in state.items() if now[0]}


def count_added_bytes(recorder: Recorder, event: int) -> int:
    """Return the bytes alive after an event in storages that were allocated during the recording."""
    alive = _replay(recorder, event)
    return sum(size_bytes for allocation, (size_bytes, _) in alive.items() if allocation not in recorder.initial)


def _find_saved_peak(recorder: Recorder) -> int:
    live_bytes, by_event, state = 0, [0], dict[Allocation, int]()
    for _, allocation, size_bytes, save_count in recorder.log:
        now = size_bytes if _is_saved(allocation, save_count) and allocation.category not in NOT_FOR_BACKWARD else 0
        live_bytes += now - state.get(allocation, 0)
        state[allocation] = now
        by_event.append(live_bytes)
    return _find_maximum(by_event)


def _find_maximum(values: list[int]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _make_row(allocation: Allocation, size_bytes: int, save_count: int) -> dict[str, Any]:
    return {
        "category": get_category(allocation, save_count),
        "bytes": size_bytes,
        "count": 1,
        "operator": allocation.operator,
        "of": "" if allocation.operand is None else _name_operand(allocation.operand),
        "module": allocation.module,
        "phase": allocation.phase,
        "shape": list(allocation.shape),
        "dtype": allocation.dtype,
        "source": allocation.source,
    }


def _make_saved_row(
    allocation: Allocation, size_bytes: int, save_count: int, compiled: Collection[str]
) -> dict[str, Any]:
    use = allocation.first_use
    first = None if use is None else {"operator": use.operator, "module": use.module, "source": use.source}
    saved_by = _name_saver(allocation, save_count)
    if saved_by == "autograd" and allocation.saved_in in compiled:
        saved_by = COMPILED_GRAPH
    saver = {"saved_in": allocation.saved_in, "saved_by": saved_by, "first_use": first}
    return {**_make_row(allocation, size_bytes, save_count), **saver}


def _name_saver(allocation: Allocation, save_count: int) -> str:
    """Return the mechanism that saved the allocation. If a recomputation is its first reader, it is a checkpoint."""
    if allocation.under_policy and not save_count:
        return "selective policy"
    use = allocation.first_use
    if allocation.category is None and use is not None and use.phase == "recompute":
        return "checkpoint"
    return "autograd" if save_count else "other code"


def _name_operand(allocation: Allocation) -> str:
    if allocation.parameter:
        return allocation.parameter + (UNSHARDED_SUFFIX if allocation.category == "gathered_weights" else "")
    if allocation.operator is None:
        return allocation.module or "an input"
    return allocation.operator


def _merge(rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], str] = repr) -> list[dict[str, Any]]:
    """Merge rows with equal keys in place, summing bytes and counts, and sort by bytes in descending order."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        first = merged.setdefault(key(row), row)
        if first is not row:
            first["bytes"] += row["bytes"]
            first["count"] += row["count"]
    return sorted(merged.values(), key=lambda row: -row["bytes"])


def _list_spans(recorder: Recorder) -> list[list[Any]]:
    """Return [phase, last event before it, its last event] for each phase, in order.

    Both are equal if it has no events.
    """
    starts = [*recorder.spans, ("", len(recorder.log))]
    return [[phase, start, end] for (phase, start), (_, end) in pairwise(starts) if end > start or phase == "optimizer"]


def merge_blocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of equal blocks: replace numbers in module names by "*", and merge equal rows.

    Args:
        rows: dicts with "module", "bytes", "count" and other columns. Bytes and counts are summed.
    Returns:
        New rows by bytes in descending order.
    """
    masked = [{name: _mask_numbers(name, value) for name, value in row.items()} for row in rows]
    return _merge(masked, key=lambda row: repr({**row, "bytes": 0, "count": 0}))


def _mask_numbers(name: str, value: Any) -> Any:
    if name in ("module", "of", "saved_in"):
        return mask_layer_numbers(value)
    if name == "first_use" and value is not None:
        return {**value, "module": mask_layer_numbers(value["module"])}
    return value
