"""Compares two predictions: the tensors that take more bytes in one run, saved for backward or alive at its peak.

    a, b = predict_step_memory(model, inputs), predict_step_memory(other, inputs)
    comparison = compare(a, b, label_a="bfloat16", label_b="rowwise")
    print(comparison.rows[0].sentence)

Rows of both reports are aligned by module (equal layers merged), operator, the parameter it was applied to, category,
shape and dtype. Two runs may compute the same tensor by different operators, such as a matmul's result in two
precisions. If each run has more rows of a different operator, the rows are treated as one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from quaver.lab.memory.predict_step import Prediction
from quaver.lab.memory.reports.pitfalls import (
    Row,
    SavedByRuns,
    find_hint,
    is_operator,
    shorten_operator,
)
from quaver.lab.recorder.timeline_report import NOT_FOR_BACKWARD, merge_blocks
from quaver.lab.terminal.byte_sizes import format_bytes, format_change

_UNNAMED_SAVERS = ("selective policy", "checkpoint", "compiled graph")


@dataclass(frozen=True)
class TensorDifference:
    """Equal tensors of all layers, if their bytes differ between two runs."""

    table: str
    """saved: saved for backward when that takes the most bytes; peak: alive at the peak."""
    category: str
    module: str
    """The module that allocated them, with "*" for a layer's number if there are several."""
    operator: str | None
    of: str
    """The operator's largest operand; empty if unknown."""
    shape: tuple[int, ...]
    dtype: str
    source: str
    saved_by: str
    first_use: dict[str, Any] | None
    """The operator, module and source of the first reader in backward."""
    bytes_a: int
    bytes_b: int
    count_a: int
    count_b: int
    num_layers: int
    """The number of modules that have the tensor."""
    hint: str
    """A way to avoid the difference; empty if none is known."""

    @property
    def difference_bytes(self) -> int:
        """The second run's bytes minus the first run's."""
        return self.bytes_b - self.bytes_a

    @property
    def per_layer_bytes(self) -> int:
        """`difference_bytes` per layer, on average."""
        return round(self.difference_bytes / self.num_layers)

    @property
    def sentence(self) -> str:
        """The row as one line of text."""
        layers = f" per layer x {self.num_layers}" if self.num_layers > 1 else ""
        amount = f"{format_change(self.per_layer_bytes)}{layers}"
        parts = [f"{amount}: {self._format_subject()}", *self._iter_details()]
        return ", ".join(parts) + (f"; {self.hint}" if self.hint else "")

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        derived = {"difference_bytes": self.difference_bytes, "sentence": self.sentence}
        return {**asdict(self), "shape": list(self.shape), **derived}

    def _format_subject(self) -> str:
        operator = shorten_operator(self.operator)
        subject = f"`{operator}`" if operator else self.category.replace("_", " ")
        if operator and self.of:
            subject += f" of {self.of}"
        if self.module and self.module not in self.of:
            subject += f" in {self.module}"
        return subject

    def _iter_details(self) -> Iterator[str]:
        count = max(self.count_a, self.count_b)
        times = f"{count // self.num_layers} x " if self.dtype and count // self.num_layers > 1 else ""
        yield f"{times}{self.dtype} ({', '.join(map(str, self.shape))})" if self.dtype else f"{count} tensors"
        if self.source:
            yield f"made at {self.source}"
        saved_by = f"{'the ' if self.saved_by in _UNNAMED_SAVERS else ''}{self.saved_by or 'other code'}"
        yield f"saved by {saved_by}" if self.table == "saved" else "alive at the peak"
        if self.first_use is not None:
            line = self.first_use.get("source")
            at = f" at {line}" if line else ""
            yield f"first used in backward by {shorten_operator(self.first_use['operator'])}{at}"
        if self.bytes_a and self.bytes_b:
            yield f"{format_bytes(self.bytes_a)} in all became {format_bytes(self.bytes_b)}"


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs, the second minus the first."""

    label_a: str
    label_b: str
    peak_bytes_a: int
    peak_bytes_b: int
    saved_bytes_a: int
    saved_bytes_b: int
    peak_at_a: str
    """The phase, module and operator of the peak."""
    peak_at_b: str
    rows: tuple[TensorDifference, ...] = field(repr=False)
    """The differences, the largest absolute value first. Rows at the peaks may differ merely because the peaks are at
    different moments of the step."""

    def list_rows(self, table: str) -> tuple[TensorDifference, ...]:
        """Return the rows with this `TensorDifference.table`, "saved" or "peak"."""
        return tuple(row for row in self.rows if row.table == table)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return vars(self) | {"rows": [row.to_dict() for row in self.rows]}


def compare(a: Prediction, b: Prediction, *, label_a: str, label_b: str) -> Comparison:
    """Align the tensors of two steps, alive at the peaks and saved for backward, and rank the differences.

    Args:
        label_a, label_b: names of the two runs for tables and pages.
    """
    saved_a, saved_b = (
        [row for row in prediction.saved_for_backward if row["category"] not in NOT_FOR_BACKWARD]
        for prediction in (a, b)
    )
    rows = [*_iter_differences("saved", saved_a, saved_b), *_iter_differences("peak", a.at_peak, b.at_peak)]
    rows.sort(key=lambda row: -abs(row.difference_bytes))
    peaks, saved_bytes = (a.peak_bytes, b.peak_bytes), (a.saved_by_forward_bytes, b.saved_by_forward_bytes)
    return Comparison(label_a, label_b, *peaks, *saved_bytes, _describe_peak(a), _describe_peak(b), tuple(rows))


def _describe_peak(prediction: Prediction) -> str:
    module = prediction.module_of_peak or "no module"
    operator = shorten_operator(prediction.operator_of_peak) or "no operator"
    return f"{prediction.phase_of_peak} of {module}, by {operator}"


@dataclass
class _AlignedRows:
    a: list[Row] = field(default_factory=list)
    b: list[Row] = field(default_factory=list)

    @property
    def difference_bytes(self) -> int:
        return _sum_bytes(self.b) - _sum_bytes(self.a)


def _sum_bytes(rows: list[Row]) -> int:
    return sum(row["bytes"] for row in rows)


def _merge_blocks_of(row: Row) -> Row:
    return merge_blocks([row])[0]


def _iter_differences(table: str, rows_a: list[Row], rows_b: list[Row]) -> Iterator[TensorDifference]:
    for described, aligned in _align(rows_a, rows_b):
        if aligned.difference_bytes:
            runs = (rows_b, rows_a) if aligned.difference_bytes > 0 else (rows_a, rows_b)
            yield _make_difference(table, described, aligned, SavedByRuns(*runs))


def _align(rows_a: list[Row], rows_b: list[Row]) -> Iterator[tuple[_AlignedRows, _AlignedRows]]:
    """Yield pairs: the rows of the one operator to describe, and all rows to count."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], _AlignedRows]] = {}
    for side, rows in (("a", rows_a), ("b", rows_b)):
        for row in rows:
            merged_row = _merge_blocks_of(row)
            tensor = merged_row["category"], merged_row["module"], tuple(merged_row["shape"]), merged_row["dtype"]
            operand = merged_row.get("of") or ""  # if two operands have equal sizes, a report may name either
            origin = merged_row["operator"], "" if is_operator(operand) else operand
            getattr(groups.setdefault(tensor, {}).setdefault(origin, _AlignedRows()), side).append(row)
    for by_origin in groups.values():
        aligned = by_origin.values()
        signs = {rows.difference_bytes > 0 for rows in aligned if rows.difference_bytes}
        if len(signs) < 2:
            yield from ((rows, rows) for rows in aligned)
            continue
        # One run has more of one operator, the other of another: the same tensor, computed in two ways.
        merged = _AlignedRows([row for rows in aligned for row in rows.a], [row for rows in aligned for row in rows.b])
        sign = 1 if merged.difference_bytes > 0 else -1
        yield max(aligned, key=lambda rows: sign * rows.difference_bytes), merged


def _make_difference(table: str, described: _AlignedRows, aligned: _AlignedRows, runs: SavedByRuns) -> TensorDifference:
    num_layers = max(len({row["module"] for row in rows}) for rows in (aligned.a, aligned.b))
    rows = described.b if aligned.difference_bytes > 0 else described.a
    operands = [_merge_blocks_of(row).get("of") for row in rows]
    row = rows[operands.index(Counter(operands).most_common(1)[0][0])]
    shown = _merge_blocks_of(row) if num_layers > 1 else row
    return TensorDifference(
        table=table,
        **{name: shown[name] for name in ("category", "module", "operator", "dtype")},
        **{name: shown.get(name) or "" for name in ("of", "source", "saved_by")},
        shape=tuple(shown["shape"]),
        first_use=shown.get("first_use"),
        bytes_a=_sum_bytes(aligned.a),
        bytes_b=_sum_bytes(aligned.b),
        count_a=sum(row["count"] for row in aligned.a),
        count_b=sum(row["count"] for row in aligned.b),
        num_layers=num_layers,
        hint=find_hint(row, runs) if table == "saved" else "",
    )
