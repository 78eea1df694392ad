"""A source: the files of `data.path` and the documents in them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from quaver.lab.data import records
from quaver.lab.data.documents import TRAIN, VALIDATION, Piece, SkippedItems, SourceFile, find_files
from quaver.lab.data.progress import Advance
from quaver.lab.data.text_files import VALIDATION_SHARE, read_texts
from quaver.lab.settings import Data


@dataclass(frozen=True)
class TextSource:
    """`files` are read; `other_files` counts those in the same folder that are not."""

    path: str
    field: str
    files: tuple[SourceFile, ...]
    has_records: bool
    other_files: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the files on disk."""
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> list[object]:
        """JSON-able; equal for sources with the same documents, judged by names, sizes and times."""
        return [self.has_records, self.field if self.has_records else "", [file.identity for file in self.files]]

    def read_pieces(self, skipped: SkippedItems, advance: Advance) -> Iterator[Piece]:
        """Yield the documents, files in order of their names; `skipped` counts the items that are not documents.

        Raises:
            InputError: for a corrupt item, if `skipped` refuses them.
            OSError: if a file cannot be read.
        """
        if not self.has_records:
            yield from read_texts(self.files, skipped, advance)
            return
        for file in self.files:
            for text in records.read_records(file, self.field, skipped, advance):
                yield Piece(choose_split(text), text)


def find_source(data: Data) -> TextSource:
    """Return the source that `data` names. Lists the files, and does not read them.

    Raises OSError as `find_files`, and InputError if pyarrow is missing for Parquet, or data.field is set for text.
    """
    files = find_files(data.path)
    record_files = [file for file in files if file.name.endswith(records.RECORD_SUFFIXES)]
    if any(file.name.endswith(records.PARQUET_SUFFIX) for file in record_files):
        records.require_pyarrow()
    if not record_files:
        data.require_default("field", unless="data.path has JSONL or Parquet files", hint="plain text has no fields")
    read = record_files or files
    return TextSource(data.path, data.field, tuple(read), bool(record_files), len(files) - len(read))


def choose_split(text: str) -> str:
    """Return the split of a document of JSONL or Parquet, from its content alone: equal documents share a split."""
    fraction = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return VALIDATION if fraction < VALIDATION_SHARE else TRAIN
