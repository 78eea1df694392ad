"""Plain text: each file is a document; a single file is cut in two, the second part for validation."""

import codecs
import hashlib
from collections.abc import Iterator, Sequence

from quaver.lab.data.documents import TRAIN, VALIDATION, Piece, SkippedItems, SourceFile
from quaver.lab.data.progress import Advance

VALIDATION_SHARE = 0.1
"""Share of the files (of the bytes, for a single file) that is held out for validation."""

CHUNK_BYTES = 1 << 20
"""Bytes of one read, and about the characters of one piece."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def read_texts(files: Sequence[SourceFile], skipped: SkippedItems, advance: Advance) -> Iterator[Piece]:
    """Yield the documents of text files in order of their names.

    A tenth of the text files is held out: those whose names have the lowest sha256. Files are read twice, first to find
    the text files; `advance` counts only the second pass.
    """
    texts = [file for file in files if _accept_text_file(file, skipped)]
    if len(texts) == 1:
        (file,) = texts
        cut = _find_character_start(file, file.size - int(file.size * VALIDATION_SHARE))
        yield from _iter_pieces(TRAIN, file, 0, cut, advance)
        yield from _iter_pieces(VALIDATION, file, cut, file.size, advance)
        return
    by_hash = sorted((file.name for file in texts), key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(by_hash[: max(1, round(len(texts) * VALIDATION_SHARE))])
    for file in texts:
        yield from _iter_pieces(VALIDATION if file.name in held_out else TRAIN, file, 0, file.size, advance)


def _accept_text_file(file: SourceFile, skipped: SkippedItems) -> bool:
    if file.size == 0:
        skipped.empty += 1
        return False
    decoder = _Utf8Decoder()
    try:
        for chunk in _read_chunks(file, 0, file.size):
            if b"\0" in chunk:
                skipped.add_corrupt(file.name, "a 0 byte, so not text")
                return False
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        skipped.add_corrupt(file.name, f"not UTF-8 ({error.reason})")
        return False
    return True


def _find_character_start(file: SourceFile, position: int) -> int:
    """Return the last byte at or before `position` that begins a UTF-8 character, or the end of the file."""
    while position < file.size and next(iter(_read_chunks(file, position, position + 1)))[0] & 0xC0 == 0x80:
        position -= 1
    return position


def _read_chunks(file: SourceFile, start: int, end: int) -> Iterator[bytes]:
    with file.path.open("rb") as stream:
        stream.seek(start)
        while chunk := stream.read(min(CHUNK_BYTES, end - start)):
            start += len(chunk)
            yield chunk
    if start < end:
        raise OSError(f"{str(file.path)!r} became shorter while it was read; begin again when nothing writes it")


def _iter_pieces(split: str, file: SourceFile, start: int, end: int, advance: Advance) -> Iterator[Piece]:
    """Yield the text of bytes `start` to `end` as a document, in pieces that end where tokens end: see `_find_seam`."""
    if start == end:
        return
    decoder, rest = _Utf8Decoder(), ""
    for chunk in _read_chunks(file, start, end):
        advance(len(chunk))
        rest += decoder.decode(chunk)
        if len(rest) > CHUNK_BYTES:
            seam = _find_seam(rest)
            yield Piece(split, rest[:seam], ends_document=False)
            rest = rest[seam:]
    yield Piece(split, rest + decoder.decode(b"", final=True))


def _find_seam(text: str) -> int:
    """Return the index at which to cut a long text: after the last line break between two non-space characters.

    The split patterns of GPT-2, Llama 3 and similar tokenizers never join characters across such a place and look no
    further ahead, so cutting there does not change the tokens. A text without such a place is cut after a line break
    that follows space, as between paragraphs, which is exact with Llama 3's pattern; without a line break, at its end.
    """
    for may_follow_space in (False, True):
        end = len(text) - 1
        while (end := text.rfind("\n", 1, end)) > 0:
            if not text[end + 1].isspace() and (may_follow_space or not text[end - 1].isspace()):
                return end + 1
    return len(text)
