"""Plain text: each file is a document, and a file that stands alone is two, the second for validation."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator

from quaver.trainer.data.documents import TRAIN, VALIDATION, Account, Document
from quaver.trainer.data.files import SourceFile
from quaver.trainer.data.report import Advance

VALIDATION_SHARE = 0.1
"""Share of the files (of the bytes, for a single file) that is kept for validation."""

READ_BYTES = 1 << 20
"""Bytes of one read, and about the characters of one piece."""

_decoder = codecs.getincrementaldecoder("utf-8")


def read_texts(files: list[SourceFile], account: Account, advance: Advance) -> Iterator[Document]:
    """Yield the documents of text files in order of their names.

    A tenth of the files is for validation: those whose names have the least sha256. They are chosen among the files
    that are text, so every file is read twice. `advance` counts the second time.
    """
    texts = [file for file in files if _is_text(file, account)]
    if len(texts) == 1:
        (file,) = texts
        cut = _character_start(file, file.size - int(file.size * VALIDATION_SHARE))
        spans = {TRAIN: (0, cut), VALIDATION: (cut, file.size)}
        yield from (
            Document(split, _pieces(file, start, end, advance)) for split, (start, end) in spans.items() if start < end
        )
        return
    by_hash = sorted((file.name for file in texts), key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(by_hash[: max(1, round(len(texts) * VALIDATION_SHARE))])
    for file in texts:
        split = VALIDATION if file.name in held_out else TRAIN
        yield Document(split, _pieces(file, 0, file.size, advance))


def _is_text(file: SourceFile, account: Account) -> bool:
    if file.size == 0:
        account.empty += 1
        return False
    decoder = _decoder()
    try:
        for chunk in _chunks(file, 0, file.size):
            if b"\0" in chunk:
                account.add_corrupt(file.name, "a 0 byte, so no text")
                return False
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        account.add_corrupt(file.name, f"not UTF-8 ({error.reason})")
        return False
    return True


def _character_start(file: SourceFile, position: int) -> int:
    """The last byte at or before `position` with which a character of UTF-8 begins, or the end of the file."""
    if position >= file.size:
        return file.size
    least = max(0, position - 3)
    with file.path.open("rb") as opened:
        opened.seek(least)
        before = opened.read(position + 1 - least)
    while before and before[-1] & 0xC0 == 0x80:
        before, position = before[:-1], position - 1
    return position


def _chunks(file: SourceFile, start: int, end: int) -> Iterable[bytes]:
    with file.path.open("rb") as opened:
        opened.seek(start)
        while start < end:
            chunk = opened.read(min(READ_BYTES, end - start))
            if not chunk:
                return
            start += len(chunk)
            yield chunk


def _pieces(file: SourceFile, start: int, end: int, advance: Advance) -> Iterator[str]:
    """Yield the text of bytes `start` to `end` in pieces that end where tokens end: see `_seam`."""
    decoder, held = _decoder(), ""
    for chunk in _chunks(file, start, end):
        advance(len(chunk))
        held += decoder.decode(chunk)
        if len(held) > READ_BYTES:
            seam = _seam(held)
            yield held[:seam]
            held = held[seam:]
    yield held + decoder.decode(b"", final=True)


def _seam(text: str) -> int:
    """Where to cut a text that is too long: after the last line break between two characters that are not space.

    GPT-2's and Llama 3's patterns, and others like them, never join characters across such a place, and see no more of
    what follows than that: the tokens are those of the uncut text. Where there is none, the line break may stand after
    space, as in paragraphs (exact with Llama 3's pattern); where there is none either, the text is cut at its end.
    """
    for before in (_is_not_space, lambda character: True):
        end = len(text) - 1
        while (end := text.rfind("\n", 1, end)) > 0:
            if before(text[end - 1]) and _is_not_space(text[end + 1]):
                return end + 1
    return len(text)


def _is_not_space(character: str) -> bool:
    return not character.isspace()
