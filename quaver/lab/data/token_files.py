"""Writes, opens and checks the files of one cache entry.

An entry is a folder:

    train.tokens, validation.tokens    the tokens, little-endian, in the smallest of 1, 2 or 4 bytes that holds them
    train.ends, validation.ends        int64: where each document ends, its end token included
    entry.json                         counts, hashes of each file, what was left out; written last

The sha256 names the tokens in checkpoints. The xxh3_128 is compared at each start, because it is eight times as fast;
neither protects against an author who writes both files.

A sequence may span documents, so a memory map of one flat array reads it in one slice (docs/design/0016-data.md).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict
from xxhash import xxh3_128

from quaver.lab.data.documents import SPLITS
from quaver.lab.data.samples import TokenSplit
from quaver.lab.data.tokenizer import Tokens
from quaver.lab.json_file import STRICT, read_json
from quaver.lab.settings.fields import NotNegative
from quaver.runtime.errors import InputError, make_write_error

ENTRY_FORMAT = 2
"""Version of this layout and of how sources become tokens: raise it when either changes."""

ENTRY_FILE = "entry.json"
SPLIT_PARTS = ("tokens", "ends")
ENDS_DTYPE = np.dtype("<i8")


@contextmanager
def explain_cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into one that says that the cache in `folder` cannot be written.

    It is a NotWrittenError if the disk or the quota is full.
    """
    try:
        yield
    except OSError as error:
        raise make_write_error(error, f"tokens to {str(folder)!r}", "give another data.cache_folder") from error


def choose_token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """Return the smallest unsigned dtype for tokens below `vocab_size`."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


class SplitWriter:
    """Writes the two files of a split from front to end, and computes their hashes."""

    def __init__(self, tokens: IO[bytes], ends: IO[bytes], dtype: "np.dtype[Any]") -> None:
        self._files, self._dtypes = (tokens, ends), (dtype, ENDS_DTYPE)
        self._items = [0, 0]
        self._hashers: list[dict[str, Any]] = [
            {"sha256": hashlib.sha256(), "xxh3_128": xxh3_128()} for _ in SPLIT_PARTS
        ]

    def append(self, tokens: Tokens) -> None:
        """Write the next tokens."""
        self._write(0, tokens)

    def end_document(self, eos_id: int) -> None:
        """Write the end token, and the position where the document ends."""
        self._write(0, [eos_id])
        self._write(1, [self._items[0]])

    def _write(self, part: int, values: Tokens | Sequence[int]) -> None:
        content = np.asarray(values).astype(self._dtypes[part]).tobytes()
        self._files[part].write(content)
        for hasher in self._hashers[part].values():
            hasher.update(content)
        self._items[part] += len(values)

    def finish(self) -> dict[str, Any]:
        """Flush to the disk; return the part of entry.json about this split."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        parts = zip(SPLIT_PARTS, self._items, self._hashers, strict=True)
        return {
            part: {"items": items} | {name: hasher.hexdigest() for name, hasher in hashers.items()}
            for part, items, hashers in parts
        }


@contextmanager
def open_split_writers(folder: Path, dtype: "np.dtype[Any]") -> Iterator[dict[str, SplitWriter]]:
    """Open the files of every split for writing, in `folder`, which exists."""
    stack = ExitStack()
    try:
        with explain_cache_errors(folder.parent):
            writers = {}
            for split in SPLITS:
                tokens, ends = (stack.enter_context((folder / f"{split}.{part}").open("wb")) for part in SPLIT_PARTS)
                writers[split] = SplitWriter(tokens, ends, dtype)
        yield writers
    finally:
        with explain_cache_errors(folder.parent):  # closing flushes the buffers
            stack.close()


class _TokenFileDigest(TypedDict):
    items: NotNegative
    sha256: str
    xxh3_128: str


class _Split(TypedDict):
    tokens: _TokenFileDigest
    ends: _TokenFileDigest


class _Splits(TypedDict):
    train: _Split
    validation: _Split


class _Description(TypedDict):
    """The content of entry.json."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    format: Literal[ENTRY_FORMAT]  # type: ignore[valid-type]
    dtype: Literal["|u1", "<u2", "<u4"]
    """A dtype of `choose_token_dtype`, and no other: numpy follows the bytes of an object array as addresses."""
    tokenizer: str
    vocab_size: NotNegative
    eos_id: NotNegative
    empty: NotNegative
    corrupt: NotNegative
    corrupt_places: list[str]
    splits: _Splits


_DESCRIPTION_ADAPTER = TypeAdapter(_Description)


@dataclass(frozen=True)
class CacheEntry:
    """An opened entry. Its splits are memory-mapped, so only the tokens that are used are read."""

    splits: dict[str, TokenSplit]
    description: dict[str, Any]


class DamagedEntryError(Exception):
    """An entry that differs from its entry.json; the message says where."""


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write entry.json, the last file of an entry."""
    with (folder / ENTRY_FILE).open("w", encoding="utf-8") as file:
        json.dump(description, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def count_entry_bytes(folder: Path) -> int:
    """Return the bytes of the files that `open_entry` reads and hashes; a missing file has none."""
    paths = (folder / f"{split}.{part}" for split in SPLITS for part in SPLIT_PARTS)
    return sum(path.stat().st_size for path in paths if path.exists())


def open_entry(folder: Path) -> CacheEntry:
    """Open the entry in `folder`, and compare its files with their hashes.

    Raises:
        FileNotFoundError: if there is no folder.
        DamagedEntryError: if a file is missing, or is not what was written; if entry.json is damaged, or the tokens
            and the ends of documents are impossible.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        checked = read_json(folder / ENTRY_FILE, _DESCRIPTION_ADAPTER, "")
        description: dict[str, Any] = {**checked}
        if description["corrupt"] and not description["corrupt_places"]:
            raise DamagedEntryError(f"{ENTRY_FILE} has corrupt items without a place")
        dtype = np.dtype(description["dtype"])
        splits = {}
        for split in SPLITS:
            expected = description["splits"][split]
            tokens = _map_file(folder / f"{split}.tokens", dtype, expected["tokens"])
            splits[split] = TokenSplit(tokens, _map_file(folder / f"{split}.ends", ENDS_DTYPE, expected["ends"]))
            _check_tokens_and_ends(split, splits[split], description["vocab_size"])
    except (InputError, FileNotFoundError) as error:
        raise DamagedEntryError(str(error).rstrip("; ")) from error
    return CacheEntry(splits, description)


def _map_file(path: Path, dtype: "np.dtype[Any]", expected: _TokenFileDigest) -> Tokens:
    size, expected_size = path.stat().st_size, expected["items"] * dtype.itemsize
    if size != expected_size or not path.is_file():
        raise DamagedEntryError(f"{path.name} has {size} bytes, expected {expected_size}")
    with path.open("rb") as file:  # hashed and mapped as one file: another rank may replace a damaged entry meanwhile
        try:
            digest = hashlib.file_digest(file, xxh3_128).hexdigest()
        except OSError as error:
            raise DamagedEntryError(f"{path.name} cannot be read: {error.strerror}") from error
        if digest != expected["xxh3_128"]:
            raise DamagedEntryError(f"{path.name} is not what was written")
        return np.memmap(file, dtype=dtype, mode="r") if size else np.empty(0, dtype)


def _check_tokens_and_ends(name: str, split: TokenSplit, vocab_size: int) -> None:
    if len(split.tokens) and split.tokens.max() >= vocab_size:
        raise DamagedEntryError(f"{name}.tokens has a token that is not below {vocab_size}")
    bounds = np.concatenate([[0], split.ends])
    if (np.diff(bounds) < 1).any() or bounds[-1] > len(split.tokens):
        raise DamagedEntryError(f"{name}.ends has documents that do not follow each other")
