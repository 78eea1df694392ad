"""A source: its files, their kind, and the documents in them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from quaver.trainer.config import Data
from quaver.trainer.config.settings import require_default
from quaver.trainer.data import json_lines, parquet
from quaver.trainer.data.documents import TRAIN, VALIDATION, Account, Document
from quaver.trainer.data.files import SourceFile, find_files
from quaver.trainer.data.report import Advance
from quaver.trainer.data.text_files import VALIDATION_SHARE, read_texts

RECORD_SUFFIXES = (*json_lines.SUFFIXES, parquet.SUFFIX)
"""Files of many documents. Where a folder has one, it is read for those alone."""


@dataclass(frozen=True)
class Source:
    """What data.path names: `files` that are read, the number of `other_files` that are not."""

    path: str
    field: str
    files: tuple[SourceFile, ...]
    has_records: bool
    other_files: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the files, as they are on disk."""
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> list[object]:
        """JSON-able; equal for sources with the same documents, as far as names, sizes and times tell."""
        return [self.has_records, self.field if self.has_records else "", [file.identity for file in self.files]]

    def documents(self, account: Account, advance: Advance) -> Iterator[Document]:
        """Yield the documents, files in order of their names; what is none goes to `account`.

        Raises:
            ValueError: for something corrupt, where `account` refuses it.
            OSError: if a file cannot be read.
        """
        if self.has_records:
            for file in self.files:
                is_parquet = file.name.endswith(parquet.SUFFIX)
                read = parquet.read_parquet if is_parquet else json_lines.read_json_lines
                for text in read(file, self.field, account, advance):
                    yield Document(split_of(text), (text,))
        else:
            yield from read_texts(list(self.files), account, advance)


def find_source(data: Data) -> Source:
    """Return the source that `data` names. Nothing but the list of files is read yet.

    Raises:
        FileNotFoundError: if the path does not exist, OSError if a folder cannot be read.
        ValueError: if there is no file, pyarrow is missing, or data.field is set for plain text.
    """
    files = find_files(data.path)
    records = [file for file in files if file.name.endswith(RECORD_SUFFIXES)]
    if any(file.name.endswith(parquet.SUFFIX) for file in records):
        parquet.require_pyarrow()
    if not records:
        require_default("data", data, "field", "data.path has JSONL or Parquet files", "plain text has no fields")
    read = records or files
    return Source(data.path, data.field, tuple(read), bool(records), len(files) - len(read))


def split_of(text: str) -> str:
    """The split of a document of JSONL or Parquet: its own content decides, so equal documents are never in both."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return VALIDATION if share < VALIDATION_SHARE else TRAIN
