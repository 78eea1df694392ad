"""Loads the tokens of a config: finds the source and the tokenizer, makes or opens the cache entry, and checks it."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quaver.lab.data.cache import TokenCache, compute_cache_key, resolve_cache_folder
from quaver.lab.data.documents import SPLITS, STDLIB, Piece, SkippedItems, make_corrupt_error
from quaver.lab.data.progress import Advance, CacheProgress
from quaver.lab.data.samples import TokenData
from quaver.lab.data.source import TextSource, find_source
from quaver.lab.data.token_files import (
    ENTRY_FORMAT,
    CacheEntry,
    choose_token_dtype,
    explain_cache_errors,
    open_split_writers,
    write_description,
)
from quaver.lab.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from quaver.lab.settings import Data, TrainConfig
from quaver.lab.terminal.counts import format_count
from quaver.runtime.errors import InputError

MAX_BATCH_CHARACTERS = 1 << 22
"""Text is tokenized in batches of about this size, on several threads if the tokenizer has them."""

_COPIED_FIELDS = ("tokenizer", "vocab_size", "eos_id", "empty", "corrupt", "corrupt_places")
"""The fields of entry.json that the run folder has too."""


def load_data(config: TrainConfig, progress: CacheProgress | None = None) -> TokenData:
    """Return the tokens of `config.data`, from the cache or made now. Every rank may call it; one makes them.

    Reads the whole cache entry, and compares it with its digests.

    Args:
        progress: shows what happens while the tokens are made; None shows nothing.
    Raises:
        FileNotFoundError: if data.path or data.tokenizer does not exist.
        OSError: if a file cannot be read, or the cache cannot be written.
        InputError: there is no text, or a split is not longer than one sequence; data is corrupt and data.on_corrupt is
            refuse; a file is not a tokenizer, or has more tokens than the model.
    """
    data = config.data
    tokenizer = load_tokenizer(data)
    check_vocabulary(tokenizer, data, config.model)
    source = find_source(data)
    cache = TokenCache(
        resolve_cache_folder(data.cache_folder),
        compute_cache_key(source, tokenizer),
        tokenizer,
        progress or CacheProgress(),
    )

    def build(folder: Path, advance: Advance) -> None:
        build_entry(folder, source, tokenizer, data, advance)

    entry = cache.get(build, f"making tokens of {data.path}", source.total_bytes)
    if entry.description["corrupt"] and data.on_corrupt == "refuse":
        raise make_corrupt_error(entry.description["corrupt_places"][0])
    _check_token_counts(entry, data, config.training.seq_len)
    return TokenData(
        entry.splits["train"],
        entry.splits["validation"],
        _describe_origin(entry, source, data, cache),
        data.document_mask,
    )


def build_entry(folder: Path, source: TextSource, tokenizer: Tokenizer, data: Data, advance: Advance) -> None:
    """Write the tokens of both splits and entry.json to `folder`. Raises InputError if there is no text."""
    skipped = SkippedItems(refuses_corrupt=data.on_corrupt == "refuse")
    dtype = choose_token_dtype(tokenizer.vocab_size)
    with open_split_writers(folder, dtype) as writers:
        for batch in _batch_pieces(source.read_pieces(skipped, advance)):
            encoded = tokenizer.encode([piece.text for piece in batch])
            with explain_cache_errors(folder.parent):
                for piece, tokens in zip(batch, encoded, strict=True):
                    writers[piece.split].append(tokens)
                    if piece.ends_document:
                        writers[piece.split].end_document(tokenizer.eos_id)
        with explain_cache_errors(folder.parent):
            splits = {split: writer.finish() for split, writer in writers.items()}
    description = {
        "format": ENTRY_FORMAT,
        "dtype": dtype.str,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "empty": skipped.empty,
        "corrupt": skipped.corrupt,
        "corrupt_places": skipped.corrupt_places,
        "splits": splits,
    }
    if not any(split["ends"]["items"] for split in splits.values()):
        end = _describe_skipped(skipped.corrupt, skipped.corrupt_places)
        raise InputError(f"data.path {data.path!r} holds no text; give a file or a folder with some{end}")
    if find_source(data).identity != source.identity:
        raise InputError(f"the files of data.path {data.path!r} changed while they were read; try again")
    with explain_cache_errors(folder.parent):
        write_description(folder, description)


def _batch_pieces(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 1
        if characters > MAX_BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _describe_skipped(corrupt: int, places: list[str]) -> str:
    return f"; {format_count(corrupt, 'corrupt item')} skipped, the first at {places[0]}" if corrupt else ""


def _check_token_counts(entry: CacheEntry, data: Data, seq_len: int) -> None:
    skipped = _describe_skipped(entry.description["corrupt"], entry.description["corrupt_places"])
    for name in SPLITS:
        count = len(entry.splits[name].tokens)
        if count <= seq_len:
            raise InputError(
                f"the {name} split of data.path {data.path!r} has {count} tokens, but one sequence needs "
                f"training.seq_len + 1 = {seq_len + 1}; give more text or a smaller training.seq_len{skipped}"
            )


def _describe_origin(entry: CacheEntry, source: TextSource, data: Data, cache: TokenCache) -> dict[str, Any]:
    origin: dict[str, Any] = {
        "path": data.path,
        "files": len(source.files),
        "other_files": source.other_files,
        **{name: entry.description[name] for name in _COPIED_FIELDS},
        **{f"{name}_documents": len(entry.splits[name].ends) for name in SPLITS},
        **{f"{name}_tokens": len(entry.splits[name].tokens) for name in SPLITS},
        "sha256": _hash_description(entry.description),
        "cache": str(cache.entry_folder),
    }
    if data.path == STDLIB:
        origin["python"] = sys.version.split()[0]
    return origin


def _hash_description(description: dict[str, Any]) -> str:
    """Return one sha256 of the tokens and the ends of documents in both splits."""
    digests = [description["splits"][name][part]["sha256"] for name in SPLITS for part in ("tokens", "ends")]
    return hashlib.sha256("".join([description["dtype"], *digests]).encode()).hexdigest()
