"""Files of JSON lines, one record for each step: written so that a killed run leaves whole lines, read, and rewound."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NotRequired, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT
from quaver.lab.runs.errors import reraise_as_not_written
from quaver.lab.settings.fields import NotNegative
from quaver.runtime.errors import InputError, NotWrittenError
from quaver.runtime.files import replace_file

_T = TypeVar("_T")


class JsonLinesWriter:
    """Appends one JSON object per line, each in one flushed write, so that a killed run leaves whole lines."""

    def __init__(self, path: Path) -> None:
        with reraise_as_not_written(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`. Raises NotWrittenError if the file cannot be written, and for inf and NaN."""
        try:
            line = json.dumps(record, allow_nan=False) + "\n"
        except ValueError as error:
            problem = "JSON has no infinity and no NaN"
            raise NotWrittenError(f"cannot write step {record['step']} to {self._file.name!r}: {problem}") from error
        with reraise_as_not_written(self._file.name):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file. After a failed `write` its buffer still has the line, and closing fails again."""
        with suppress(OSError):
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, without an incomplete last line: the run may go on, or was killed.

    Raises:
        InputError: a line is not a record.
        OSError: the file cannot be read.
    """
    return [dict(record) for record in iter_json_lines(path, _LINE_ADAPTER, _LINE_NAME)]


def iter_json_lines(path: Path, adapter: TypeAdapter[_T], expected: str) -> Iterator[_T]:
    """Yield the whole lines, validated by `adapter`. Raises InputError for a line that is not `expected`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parse_line(line, path, number, adapter, expected)


def has_incomplete_last_line(path: Path) -> bool:
    """Return whether the last line of a file is incomplete. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 1, 0))
        return file.read()[-1:] not in (b"", b"\n")


@contextmanager
def rewind_json_lines(paths: Sequence[Path], step: int) -> Iterator[list[str]]:
    """Remove the records after `step`, and an incomplete last line, from files of JSON lines, after the block.

    Yields what is removed, in words, for each file. Memory is bounded by the longest line. An error in the block, or in
    reading or writing a file, leaves every file as it was.

    Raises:
        InputError: a line is not a record.
        OSError: a file cannot be read or written.
    """
    existing = [path for path in paths if path.exists()]
    for path in existing:
        if not path.is_file():  # reading a FIFO would block
            raise InputError(f"{str(path)!r} is not a file; remove it")
    removed = []
    with ExitStack() as replacements:
        for path in existing:
            partial = replacements.enter_context(replace_file(path))
            later_steps, last_step = 0, step
            with path.open("rb") as file, partial.open("wb") as rewound:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        removed.append(f"the incomplete last line of {path.name}")
                    elif (record_step := _parse_line(line, path, number, _LINE_ADAPTER, _LINE_NAME)["step"]) <= step:
                        rewound.write(line)
                    else:
                        later_steps += record_step != last_step
                        last_step = record_step
            if later_steps:
                removed.append(f"{later_steps:,} recorded steps of {path.name}")
        yield removed


class RecordKind(StrEnum):
    """The `kind` of a line of metrics.jsonl: the numbers of a model's step or validation, or why a step has none."""

    STEP = "step"
    SKIPPED_STEP = "skipped_step"
    NONFINITE_STEP = "nonfinite_step"
    """The step that ended the run."""
    VALIDATION = "validation"


class _Line(TypedDict):
    """The fields of a line that are read; lines have more, and only metrics.jsonl has a `RecordKind`."""

    __pydantic_config__ = {**STRICT, "extra": "allow"}  # type: ignore[misc]
    step: NotNegative
    kind: NotRequired[str]
    model: NotRequired[str]
    reason: NotRequired[str]
    loss: NotRequired[float]
    validation_loss: NotRequired[float]
    tokens_per_s: NotRequired[float]


_LINE_ADAPTER, _LINE_NAME = TypeAdapter(_Line), "a record of a step"


def _parse_line(line: bytes, path: Path, number: int, adapter: TypeAdapter[_T], expected: str) -> _T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise InputError(f"line {number} of {str(path)!r} is not {expected}; remove the line") from error
