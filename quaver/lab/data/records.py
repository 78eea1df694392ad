"""Files of many documents: JSONL, plain or gzipped, and Parquet. Each yields its texts in order.

docs/design/0016-data.md says why `datasets` is not used. pyarrow reads without threads: with them, it would depend on
their timing whether the rows before a damaged page are returned.
"""

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from quaver.lab.data.documents import SkippedItems, SourceFile
from quaver.lab.data.progress import Advance
from quaver.runtime.errors import InputError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
PARQUET_SUFFIX = ".parquet"
RECORD_SUFFIXES = (*JSONL_SUFFIXES, PARQUET_SUFFIX)

STRING_TYPES = ("string", "large_string", "string_view")
"""The names of Arrow's types of text."""

BATCH_ROWS = 1024
BUFFER_BYTES = 1 << 20


def read_records(file: SourceFile, field: str, skipped: SkippedItems, advance: Advance) -> Iterator[str]:
    """Yield the texts of `file`; a file that breaks off yields what precedes the break. Raises as `read_pieces`."""
    read = _read_parquet if file.name.endswith(PARQUET_SUFFIX) else _read_json_lines
    return read(file, field, skipped, advance)


def require_pyarrow() -> None:
    """Raise InputError if pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError("Parquet files need pyarrow, which is not installed; pip install 'quaver[data]'")


def _read_json_lines(file: SourceFile, field: str, skipped: SkippedItems, advance: Advance) -> Iterator[str]:
    counted_bytes = number = 0
    with file.path.open("rb") as stream:
        lines: Iterable[bytes] = gzip.GzipFile(fileobj=stream) if file.name.endswith(".gz") else stream
        try:
            for number, line in enumerate(lines, start=1):
                place = f"{file.name}:{number}"
                value = _get_field(line, field, place, skipped) if line.strip() else None
                if value is not None and skipped.accept_text(place, value):
                    yield value
                advance(stream.tell() - counted_bytes)
                counted_bytes = stream.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            skipped.add_corrupt(f"{file.name}:{number + 1}", f"the archive is broken here ({error}), the rest is lost")


def _get_field(line: bytes, field: str, place: str, skipped: SkippedItems) -> Any:
    """Return the value of `field` in the JSON object `line`, or None, counted as corrupt, if it is missing."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        skipped.add_corrupt(place, f"not JSON ({error})")
        return None
    value = content.get(field) if isinstance(content, dict) else None
    if value is None:
        given = f"a {type(content).__name__}"
        if isinstance(content, dict):
            given = "null in it" if field in content else f"an object without the field {field!r}"
        skipped.add_corrupt(place, f"expected an object with text in the field {field!r}, got {given}")
    return value


def _read_parquet(file: SourceFile, field: str, skipped: SkippedItems, advance: Advance) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    row = 0
    try:
        with file.path.open("rb") as stream:
            parquet = ParquetFile(stream, buffer_size=BUFFER_BYTES)
            schema = parquet.schema_arrow
            has_text = _has_strings(schema, field)
            if not has_text:
                columns = ", ".join(schema.names)
                skipped.add_corrupt(file.name, f"no column of strings {field!r}; its columns are {columns}")
            for row, scalar in enumerate(_iter_column(parquet, field) if has_text else (), start=1):
                place = f"{file.name}:{row}"
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError as error:
                    skipped.add_corrupt(place, f"not UTF-8 ({error.reason})")
                    continue
                if skipped.accept_text(place, value):
                    yield value
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the name of a column may be no UTF-8
        if getattr(error, "errno", None) is not None:  # the system's error, not pyarrow's for a damaged page
            raise
        reason = str(error).partition("\n")[0]
        skipped.add_corrupt(f"{file.name}:{row + 1}", f"not readable as Parquet ({reason})")
    advance(file.size)


def _has_strings(schema: Any, field: str) -> bool:
    if schema.names.count(field) != 1:
        return False
    column_type = schema.field(field).type
    return str(column_type.value_type if str(column_type).startswith("dictionary") else column_type) in STRING_TYPES


def _iter_column(parquet: Any, field: str) -> Iterator[Any]:
    """Yield the values of a column as Arrow scalars, so that no other value is lost if one is not UTF-8."""
    for row_group in range(parquet.num_row_groups):
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[row_group], columns=[field], use_threads=False):
            yield from batch.column(0)
