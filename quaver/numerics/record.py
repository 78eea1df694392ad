"""numerics.jsonl: the statistics of a run's float8 matmuls, one JSON object per line, schema 1; docs/monitor.md.

    {"kind": "header", "schema": 1, "step": 1, "statistics": [...], "tensors": [{"layer", "operand", "cast", ...}], ...}
    {"kind": "sample", "step": 100, "amax": [one value per tensor], ..., "histogram": {...}, "whatif": {...}}
    {"kind": "alarm" | "cleared", "step": 100, "rule": ..., ...}

Only the first rank writes. A record starts with a header. Each resume, and each sample after a change of
`high_precision_matmuls`, adds another header. A header describes the tensors of the samples after it. NaN and
infinities, which JSON lacks, are the strings "nan", "inf" and "-inf". A value that does not apply to a tensor is null.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from quaver.runtime.errors import InputError
from quaver.runtime.files import replace_file

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
LINE_KINDS = ("header", "sample", "alarm", "cleared")
RECORD_FILE_NAME = "numerics.jsonl"

HISTOGRAM_STEPS_PER_DOUBLING = 8
"""A histogram stores round(8 log2(1 + count)) in a byte: counts to 4.5%, up to 2^31."""

MAX_HISTOGRAM_BINS = 256
"""The exponents of float32."""

_NONFINITE_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Float64Array = NDArray[np.float64]


class TensorKey(NamedTuple):
    """Identifies a tensor in all samples; `cast` is "row", "column", "both" or "result"."""

    layer: str
    operand: str
    cast: str

    @classmethod
    def from_header(cls, tensor: Mapping[str, Any]) -> TensorKey:
        """Return the key of a tensor's entry in a header."""
        return cls(tensor["layer"], tensor["operand"], tensor["cast"])


class Sink(Protocol):
    """A destination of the lines of a record."""

    def write(self, line: dict[str, Any]) -> None:
        """Write a line, whose floats may be NaN or infinite."""

    def close(self) -> None:
        """Stop writing."""


AnySink = str | Path | Sink | Callable[[dict[str, Any]], None] | None


def make_sink(sink: AnySink) -> Sink | None:
    """Return a sink for the path of a record, a function of a line, or a sink; None for None. Raises TypeError."""
    if sink is None:
        return None
    if isinstance(sink, str | Path):
        return RecordWriter(sink)
    if hasattr(sink, "write") and hasattr(sink, "close"):
        return sink
    if callable(sink):
        return typing.cast(Sink, SimpleNamespace(write=sink, close=lambda: None))
    raise TypeError(f"sink: expected a path, a function or an object with write and close, got {sink!r}")


class RecordWriter:
    """Appends lines to a record, each in one flushed write, so that a killed run leaves complete lines.

    Writing a header removes the lines at and after its step and an incomplete last line, because a run resumes or
    repeats from that step. The number of removed lines is logged, as a warning if no sample stays. A file that was
    moved away or truncated during the run gets the last header again, which is logged.

    Raises:
        OSError: the file cannot be written.
        ValueError: a line of the file does not belong to a record; or another writer of this process wrote a header to
            the file and is not closed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._header: dict[str, Any] | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Append one line, whose floats may be NaN or infinite."""
        if line["kind"] == "header":
            if _open_writers.setdefault(os.path.realpath(self.path), self) is not self:
                raise InputError(f"another monitor of this process writes to {str(self.path)!r}; give another path")
            _rewind(self.path, line["step"])
            self._header = line
        elif self._header is not None and not (self.path.is_file() and self.path.stat().st_size):
            self._append({**self._header, "step": line["step"]})
            logger.warning("%r was moved or truncated: a new record begins at step %s", str(self.path), line["step"])
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_encode_nonfinite(line), allow_nan=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Let another writer write to the file, which is not open between two lines."""
        for path in [path for path, writer in _open_writers.items() if writer is self]:
            del _open_writers[path]


_open_writers: WeakValueDictionary[str, RecordWriter] = WeakValueDictionary()
"""The writers that wrote a header and are not closed, by the resolved path of their file."""


def _rewind(path: Path, step: int) -> None:
    """Remove the lines at and after `step`, and log their number. An error leaves the file unchanged."""
    if not path.exists():
        return
    removed, has_sample = 0, False
    with replace_file(path) as partial, partial.open("wb") as rewound:
        for text, line in _iter_lines(path):
            if line is not None and line["step"] < step:
                rewound.write(text)
                has_sample |= line["kind"] == "sample"
            else:
                removed += 1
    if removed:
        level = logging.INFO if has_sample else logging.WARNING
        logger.log(level, "removed %s lines from step %s on from %r, which this run repeats", removed, step, str(path))


def _encode_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _encode_nonfinite(item) for name, item in value.items()}
    return [_encode_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Histogram:
    """The numbers of elements with a magnitude in [2^(low + i), 2^(low + i + 1)), by tensor and bin i.

    The bins cover all counted magnitudes. Zeros, subnormals of float32 and non-finite elements are not counted.
    """

    low: int
    before: Float64Array
    """[tensors, bins], of the high-precision operand; NaN for tensors without a histogram."""
    after: Float64Array
    """[tensors, bins], of the dequantized codes."""


@dataclass(frozen=True)
class Record:
    """The contents of a record. Arrays have a column for each of `tensors`, and NaN where a value does not apply."""

    header: dict[str, Any]
    """The last header, with the tensors of all headers."""
    steps: NDArray[np.int64]
    """[samples], ascending."""
    statistics: dict[str, Float64Array]
    """Statistics by name, each [samples, tensors]."""
    whatif: dict[str, Float64Array] = field(default_factory=dict)
    """SQNR in dB under other recipes, by name [samples, tensors]."""
    sums: dict[str, Float64Array] = field(default_factory=dict)
    """SQNR in dB of a result's casts and of a GPU's sums: "casts", "fast" and "exact", each [samples, tensors]."""
    histograms: dict[int, Histogram] = field(default_factory=dict)
    """Histograms by the index of the sample."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the kinds "alarm" and "cleared", in order."""
    headers: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The headers and samples in order, with NaN and infinities as floats, as `Alarms.update` takes them. Empty without
    `keeps_lines`."""
    is_torn: bool = False
    """Whether an incomplete last line, left by a killed run, was ignored."""

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The columns, each with layer, operand, cast, granularity, block, dtype and recipe."""
        return list(self.header["tensors"])

    @classmethod
    def read(cls, path: str | Path, *, keeps_lines: bool = False) -> Record:
        """Read a record from the path of a file or of a run folder.

        Raises:
            ValueError: there is no record, it has another schema or no samples, or a line is damaged.
        """
        path = Path(path)
        path = path / RECORD_FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise InputError(
                f"expected statistics in {str(path)!r}, which is not a file; record them with quaver.monitor"
            )
        try:
            lines = [line for _, line in _iter_lines(path)]
        except OSError as error:
            raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
        complete = [line for line in lines if line is not None]
        return _build_record(path, complete, len(complete) < len(lines), keeps_lines)


def read_last_samples(path: Path, *, before: int, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the last `count` samples of a record before step `before`, each with its header; [] without a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is damaged.
    """
    samples: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=count)
    header: dict[str, Any] = {}
    if not path.is_file():
        return []
    for _, line in _iter_lines(path):
        if line is not None and line["kind"] == "header":
            header = line
        elif line is not None and header and line["kind"] == "sample" and line["step"] < before:
            samples.append((header, line))
    return list(samples)


def _iter_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line's bytes and contents; None for an incomplete last line. Raises OSError or ValueError."""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            yield text, _parse_line(text, path, number) if text.endswith(b"\n") else None


def _parse_line(text: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse one line. Raises ValueError if it does not belong to a record of this schema."""
    try:
        line = json.loads(text)
        is_line = isinstance(line, dict) and line.get("kind") in LINE_KINDS and isinstance(line.get("step"), int)
    except (ValueError, RecursionError):
        is_line = False
    if not is_line or not 0 <= line["step"] < 2**63:
        raise _make_line_error(path, number, "it is not a JSON object with a kind and a step")
    if line["kind"] == "header" and line.get("schema") != SCHEMA_VERSION:
        writer = line.get("quaver", "another version")
        raise InputError(
            f"expected schema {SCHEMA_VERSION} in {str(path)!r}, got {line.get('schema')!r}; read it with quaver "
            f"{writer}"
        )
    return dict(line)


def _make_line_error(path: Path, number: int, reason: str) -> InputError:
    if number == 1:
        return InputError(f"line 1 of {str(path)!r}: {reason}; the file is not a record of numerics")
    return InputError(f"line {number} of {str(path)!r} is damaged: {reason}; remove the line")


def _build_record(path: Path, lines: list[dict[str, Any]], is_torn: bool, keeps_lines: bool) -> Record:
    if not lines or lines[0]["kind"] != "header":
        raise InputError(f"expected a header in the first line of {str(path)!r}; it is not a record of numerics")
    numbered = enumerate(lines, start=1)
    headers = [_check_header(line, path, number) for number, line in numbered if line["kind"] == "header"]
    samples = [line for line in lines if line["kind"] == "sample"]
    if not samples:
        raise InputError(
            f"{str(path)!r} has no samples: the run ended before its first, or the model was in eval() mode; train "
            "longer, sample more often, or call model.train()"
        )
    names = list(dict.fromkeys(name for header in headers for name in header["statistics"]))
    tensors = {TensorKey.from_header(tensor): tensor for header in headers for tensor in header["tensors"]}
    builder = _RecordBuilder(path, names, {key: column for column, key in enumerate(tensors)}, len(samples))
    for number, line in enumerate(lines, start=1):
        builder.add(number, line)
    return Record(
        header={**headers[-1], "statistics": names, "tensors": list(tensors.values())},
        steps=np.array([sample["step"] for sample in samples], dtype=np.int64),
        statistics=builder.statistics,
        whatif=builder.tables["whatif"],
        sums=builder.tables["sums"],
        histograms=builder.histograms,
        alarms=[_decode_nonfinite(line) for line in lines if line["kind"] in ("alarm", "cleared")],
        headers=headers,
        lines=[_decode_nonfinite(line) for line in lines if line["kind"] in ("header", "sample")]
        if keeps_lines
        else [],
        is_torn=is_torn,
    )


def _check_header(line: dict[str, Any], path: Path, number: int) -> dict[str, Any]:
    tensors, names = line.get("tensors"), line.get("statistics")
    if not isinstance(names, list) or not isinstance(tensors, list) or not all(isinstance(name, str) for name in names):
        raise _make_line_error(path, number, "the header lacks statistics or tensors")
    for tensor in tensors:
        if not (isinstance(tensor, dict) and all(isinstance(tensor.get(name), str) for name in TensorKey._fields)):
            raise _make_line_error(path, number, "a tensor of the header lacks its layer, operand or cast")
    return line


def _decode_nonfinite(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE_NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {name: _decode_nonfinite(item) for name, item in value.items()}
    return [_decode_nonfinite(item) for item in value] if isinstance(value, list) else value


class _RecordBuilder:
    """Puts the values of samples into arrays, in the columns of the tensors that the last header lists."""

    def __init__(self, path: Path, names: Sequence[str], columns: dict[TensorKey, int], samples: int) -> None:
        self.path, self.columns, self.shape = path, columns, (samples, len(columns))
        self.statistics = {name: np.full(self.shape, np.nan) for name in names}
        self.tables: dict[str, dict[str, Float64Array]] = {"whatif": {}, "sums": {}}
        self.histograms: dict[int, Histogram] = {}
        self._header: dict[str, Any] = {}
        self._header_columns: list[int] = []
        self._index, self._step = 0, -1

    def add(self, number: int, line: dict[str, Any]) -> None:
        """Add the next line of the file, the `number`th."""
        if line["kind"] == "header":
            self._header = line
            self._header_columns = [self.columns[TensorKey.from_header(tensor)] for tensor in line["tensors"]]
        elif line["kind"] == "sample":
            try:
                self._add_sample(line)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise _make_line_error(self.path, number, f"{type(error).__name__}: {error}") from error

    def _add_sample(self, line: dict[str, Any]) -> None:
        if line["step"] <= self._step:
            raise ValueError(f"expected a step after {self._step}, got {line['step']}")
        self._step = line["step"]
        columns = self._header_columns
        for name in self._header["statistics"]:
            self.statistics[name][self._index, columns] = _parse_numbers(line[name], len(columns))
        for field_name, table in self.tables.items():
            for name, values in (line.get(field_name) or {}).items():
                array = table.setdefault(name, np.full(self.shape, np.nan))
                array[self._index, columns] = _parse_numbers(values, len(columns))
        if line.get("histogram") is not None:
            self.histograms[self._index] = self._parse_histogram(line["histogram"], columns)
        self._index += 1

    def _parse_histogram(self, histogram: dict[str, Any], columns: list[int]) -> Histogram:
        if not 0 <= histogram["bins"] <= MAX_HISTOGRAM_BINS:
            raise ValueError(f"expected at most {MAX_HISTOGRAM_BINS} bins, got {histogram['bins']}")
        counts = {}
        for name in ("before", "after"):
            counts[name] = np.full((self.shape[1], histogram["bins"]), np.nan)
            for column, text in zip(columns, histogram[name], strict=True):
                if text is not None:
                    counts[name][column] = decode_counts(text)
        return Histogram(histogram["low"], counts["before"], counts["after"])


def _parse_numbers(values: list[Any], count: int) -> Float64Array:
    if len(values) != count:
        raise ValueError(f"expected {count} values, got {len(values)}")
    try:
        return np.array(values, dtype=np.float64)  # None becomes NaN, and "inf" a number
    except ValueError as error:
        raise ValueError(f"expected numbers, got {error}") from error


def encode_counts(counts: Sequence[float]) -> str:
    """Encode the counts of a histogram, to about 4.5%."""
    scaled = np.rint(HISTOGRAM_STEPS_PER_DOUBLING * np.log2(1 + np.asarray(counts, dtype=np.float64)))
    return base64.b64encode(scaled.clip(0, 255).astype(np.uint8).tobytes()).decode()


def decode_counts(text: str) -> Float64Array:
    """Decode the counts of one tensor's histogram, [bins]."""
    scaled = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    return np.exp2(scaled / HISTOGRAM_STEPS_PER_DOUBLING) - 1
