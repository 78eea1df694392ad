"""Parquet: each row is a document, in one column. Needs pyarrow."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from quaver.trainer.data.documents import Account
from quaver.trainer.data.files import SourceFile
from quaver.trainer.data.report import Advance

SUFFIX = ".parquet"

BATCH_ROWS = 1024


def require_pyarrow() -> None:
    """Raise ValueError where pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet files need pyarrow, which is not installed; pip install 'quaver[data]'")


def read_parquet(file: SourceFile, field: str, account: Account, advance: Advance) -> Iterator[str]:
    """Yield the texts in order. A broken file ends where it breaks; one without the column gives nothing."""
    import pyarrow as pa
    from pyarrow import parquet

    row = 0
    try:
        with file.path.open("rb") as raw, parquet.ParquetFile(raw) as opened:
            if not _has_text(opened.schema_arrow, field):
                columns = ", ".join(str(column) for column in opened.schema_arrow.names)
                account.add_corrupt(file.name, f"no column of strings {field!r}; its columns are {columns}")
                return
            rows = max(1, opened.metadata.num_rows)
            for batch in opened.iter_batches(batch_size=BATCH_ROWS, columns=[field]):
                yield from _texts(batch.column(0), file.name, row, account)
                advance(file.size * (row + len(batch)) // rows - file.size * row // rows)
                row += len(batch)
    except pa.ArrowException as error:
        account.add_corrupt(f"{file.name}:{row + 1}", f"not readable as Parquet ({_first_line(error)})")
    except OSError as error:
        if error.errno is not None:  # the system's, not pyarrow's word for a page that makes no sense
            raise
        account.add_corrupt(f"{file.name}:{row + 1}", f"not readable as Parquet ({_first_line(error)})")


def _texts(column: Any, name: str, row: int, account: Account) -> Iterator[str]:
    for number, scalar in enumerate(column, start=row + 1):
        place = f"{name}:{number}"
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            account.add_corrupt(place, f"not UTF-8 ({error.reason})")
            continue
        if account.is_text(place, value):
            yield value


def _has_text(schema: Any, field: str) -> bool:
    import pyarrow as pa

    if schema.names.count(field) != 1:
        return False
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
