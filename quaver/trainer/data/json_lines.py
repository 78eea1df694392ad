"""JSONL, plain or gzipped: each line is an object, one field of which is a document."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, cast

from quaver.trainer.data.documents import Account
from quaver.trainer.data.files import SourceFile
from quaver.trainer.data.report import Advance

SUFFIXES = (".jsonl", ".jsonl.gz")

_BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)


def read_json_lines(file: SourceFile, field: str, account: Account, advance: Advance) -> Iterator[str]:
    """Yield the texts in order. Lines of nothing but space are no items; a broken archive ends where it breaks."""
    done = 0
    with file.path.open("rb") as raw, _lines(file, raw) as lines:
        for number, line in _readable(lines, file.name, account):
            place = f"{file.name}:{number}"
            text = _field(line, field, place, account)
            if text is not None and account.is_text(place, text):
                yield cast(str, text)
            position = raw.tell()
            advance(position - done)
            done = position


def _lines(file: SourceFile, raw: IO[bytes]) -> AbstractContextManager[Iterable[bytes]]:
    return (
        cast(AbstractContextManager[Iterable[bytes]], gzip.open(raw)) if file.name.endswith(".gz") else nullcontext(raw)
    )


def _readable(lines: Iterable[bytes], name: str, account: Account) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            yield number, line
    except _BROKEN as error:
        account.add_corrupt(f"{name}:{number + 1}", f"the archive is broken here ({error}), the rest is lost")


def _field(line: bytes, field: str, place: str, account: Account) -> Any:
    """The value of `field` in the object that `line` is; None, counted, where there is none."""
    if not line.strip():
        return None
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        account.add_corrupt(place, f"not JSON ({error})")
        return None
    if not isinstance(found, dict) or found.get(field) is None:
        what = f"an object without the field {field!r}" if isinstance(found, dict) else f"a {type(found).__name__}"
        account.add_corrupt(place, f"expected an object with text in the field {field!r}, got {what}")
        return None
    return found[field]
