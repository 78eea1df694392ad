"""Compares two predictions: tensors that one run saves, or has alive at its peak, and the other does not.

    comparison = compare(explain(model, inputs), explain(other, inputs), label_a="bfloat16", label_b="rowwise")
    print(comparison.rows[0].sentence)

Rows of both reports are aligned by module (equal layers merged), operator, the parameter it was applied to, category,
shape and dtype. If only the operators differ, one run having more of one and the other more of another, they make the
same tensor in two ways, such as a matmul's result in two precisions; those rows are merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from quaver.lab.memory.predict import Prediction
from quaver.lab.memory.reports.pitfalls import Row, SavedByRuns, hint_of, is_operator, short_operator, si
from quaver.lab.recorder.report import NOT_FOR_BACKWARD, merged_layers

_NOT_A_NAME = ("selective policy", "checkpoint", "compiled graph")


@dataclass(frozen=True)
class TensorDifference:
    """Equal tensors of all layers, of which one run has more than the other."""

    at: str
    """saved: for backward, when that is most; peak: alive at the peak."""
    category: str
    module: str
    """The module that made them, with "*" for a layer's number if there are several."""
    operator: str | None
    of: str
    """The operator's largest operand; empty if unknown."""
    shape: tuple[int, ...]
    dtype: str
    source: str
    saved_by: str
    first_use: dict[str, Any] | None
    """operator, module and source of the first reader in backward."""
    bytes_a: int
    bytes_b: int
    count_a: int
    count_b: int
    layers: int
    """The number of modules with such a tensor."""
    hint: str
    """A way to save it; empty if none is known."""

    @property
    def difference_bytes(self) -> int:
        """Bytes of the second run minus those of the first."""
        return self.bytes_b - self.bytes_a

    @property
    def per_layer_bytes(self) -> int:
        """`difference_bytes` per layer, on average."""
        return round(self.difference_bytes / self.layers)

    @property
    def sentence(self) -> str:
        """The row as one line of text."""
        words = [f"{self._amount()}: {self._what()}", *self._circumstances()]
        return ", ".join(words) + (f"; {self.hint}" if self.hint else "")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        more = {"difference_bytes": self.difference_bytes, "sentence": self.sentence}
        return {**asdict(self), "shape": list(self.shape), **more}

    def _amount(self) -> str:
        each = self.per_layer_bytes
        layers = f" per layer x {self.layers}" if self.layers > 1 else ""
        return f"{'+' if each > 0 else ''}{si(each)} ({each:+,} bytes){layers}"

    def _what(self) -> str:
        operator = short_operator(self.operator)
        what = f"`{operator}`" if operator else self.category.replace("_", " ")
        where = f" of {self.of}" if operator and self.of else ""
        if self.module and self.module not in self.of:
            where += f" in {self.module}"
        return f"{what}{where}"

    def _circumstances(self) -> Iterator[str]:
        count = max(self.count_a, self.count_b)
        each = f"{count // self.layers} x " if self.dtype and count // self.layers > 1 else ""
        yield f"{each}{self.dtype} ({', '.join(map(str, self.shape))})" if self.dtype else f"{count} tensors"
        if self.source:
            yield f"made at {self.source}"
        saved_by = f"{'the ' if self.saved_by in _NOT_A_NAME else ''}{self.saved_by or 'other code'}"
        yield f"saved by {saved_by}" if self.at == "saved" else "alive at the peak"
        if self.first_use is not None:
            line = self.first_use.get("source")
            at = f" at {line}" if line else ""
            yield f"first used in backward by {short_operator(self.first_use['operator'])}{at}"
        if self.bytes_a and self.bytes_b:
            yield f"{si(self.bytes_a)} in all became {si(self.bytes_b)}"


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs, the second minus the first."""

    label_a: str
    label_b: str
    peak_a: int
    peak_b: int
    saved_a: int
    saved_b: int
    peak_at_a: str
    """Phase, module and operator of the peak."""
    peak_at_b: str
    rows: tuple[TensorDifference, ...] = field(repr=False)
    """By size, whatever the sign. Rows of the peaks may differ only because the peaks are at other moments."""

    def at(self, moment: str) -> tuple[TensorDifference, ...]:
        """The rows of "saved" or of "peak"."""
        return tuple(row for row in self.rows if row.at == moment)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return vars(self) | {"rows": [row.to_dict() for row in self.rows]}


def compare(a: Prediction, b: Prediction, *, label_a: str, label_b: str) -> Comparison:
    """Align the tensors of two steps, alive at the peaks and saved for backward, and rank the differences.

    Args:
        label_a, label_b: names of the two for tables and pages.
    """
    saved = [[row for row in each.saved_for_backward if row["category"] not in NOT_FOR_BACKWARD] for each in (a, b)]
    rows = [*_differences("saved", *saved), *_differences("peak", a.at_peak, b.at_peak)]
    rows.sort(key=lambda row: -abs(row.difference_bytes))
    peaks, saved_bytes = (a.peak_bytes, b.peak_bytes), (a.saved_by_forward_bytes, b.saved_by_forward_bytes)
    return Comparison(label_a, label_b, *peaks, *saved_bytes, _peak_of(a), _peak_of(b), tuple(rows))


def _peak_of(prediction: Prediction) -> str:
    where = prediction.module_of_peak or "no module"
    return f"{prediction.phase_of_peak} of {where}, by {short_operator(prediction.operator_of_peak) or 'no operator'}"


@dataclass
class _Alike:
    """Equal rows of both reports."""

    a: list[Row] = field(default_factory=list)
    b: list[Row] = field(default_factory=list)

    @property
    def difference_bytes(self) -> int:
        return _bytes(self.b) - _bytes(self.a)


def _parameter(of: str) -> str:
    """The parameter among the operands. Of two operands of equal size a report may name either."""
    return "" if is_operator(of) else of


def _typical(rows: list[Row]) -> Row:
    """The first row with the most frequent operand."""
    made_of = [_folded(row).get("of") for row in rows]
    return rows[made_of.index(Counter(made_of).most_common(1)[0][0])]


def _bytes(rows: list[Row]) -> int:
    return sum(row["bytes"] for row in rows)


def _folded(row: Row) -> Row:
    return merged_layers([row])[0]


def _differences(at: str, rows_a: list[Row], rows_b: list[Row]) -> Iterator[TensorDifference]:
    for described, alike in _aligned(rows_a, rows_b):
        if alike.difference_bytes:
            both = (rows_b, rows_a) if alike.difference_bytes > 0 else (rows_a, rows_b)
            yield _difference(at, described, alike, SavedByRuns(*both))


def _aligned(rows_a: list[Row], rows_b: list[Row]) -> Iterator[tuple[_Alike, _Alike]]:
    """Yield pairs: the rows of one operator that describe the difference, and all rows that are equal."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], _Alike]] = {}
    for side, rows in (("a", rows_a), ("b", rows_b)):
        for row in rows:
            folded = _folded(row)
            tensor = folded["category"], folded["module"], tuple(folded["shape"]), folded["dtype"]
            made = folded["operator"], _parameter(folded.get("of") or "")
            getattr(groups.setdefault(tensor, {}).setdefault(made, _Alike()), side).append(row)
    for by_operator in groups.values():
        signs = {each.difference_bytes > 0 for each in by_operator.values() if each.difference_bytes}
        if len(signs) < 2:
            yield from ((each, each) for each in by_operator.values())
            continue
        ways = by_operator.values()
        joined = _Alike([row for each in ways for row in each.a], [row for each in ways for row in each.b])
        sign = 1 if joined.difference_bytes > 0 else -1
        yield max(ways, key=lambda each: sign * each.difference_bytes), joined


def _difference(at: str, described: _Alike, alike: _Alike, rows: SavedByRuns) -> TensorDifference:
    layers = max(len({row["module"] for row in rows}) for rows in (alike.a, alike.b))
    row = _typical(described.b if alike.difference_bytes > 0 else described.a)
    seen = _folded(row) if layers > 1 else row
    return TensorDifference(
        at=at,
        **{name: seen[name] for name in ("category", "module", "operator", "dtype")},
        **{name: seen.get(name) or "" for name in ("of", "source", "saved_by")},
        shape=tuple(seen["shape"]),
        first_use=seen.get("first_use"),
        bytes_a=_bytes(alike.a),
        bytes_b=_bytes(alike.b),
        count_a=sum(each["count"] for each in alike.a),
        count_b=sum(each["count"] for each in alike.b),
        layers=layers,
        hint=hint_of(row, rows) if at == "saved" else "",
    )
