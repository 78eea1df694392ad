r"""Tokenizers in tiktoken's format, read as Llama 3's: a file of lines `base64-of-the-bytes rank`.

Facts, from `load_tiktoken_bpe` of tiktoken 0.14 and the tokenizer that Meta published with Llama 3 in April 2024:

- Text is split by SPLIT_PATTERN, then bytes are merged in order of their ranks.
- 256 special tokens follow the ranks (128,000 in Llama 3, so 128,256 tokens). The first is <|begin_of_text|>, the
  second <|end_of_text|>; <|start_header_id|>, <|end_header_id|> and <|eot_id|> are number 6, 7 and 9. The others
  are reserved, and have other names in other releases.
- Runs of more than 25,000 characters that are all space, or all not, are cut there.
"""

import base64
import binascii
import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL_COUNT = 256
NAMED = {
    "<|begin_of_text|>": 0,
    "<|end_of_text|>": 1,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|eot_id|>": 9,
}
"""Special tokens that have one name in every release."""

LONGEST_RUN = 25_000
_LONG_RUNS = re.compile(rf"(?<!\S)\S{{{LONGEST_RUN + 1},}}|(?<!\s)\s{{{LONGEST_RUN + 1},}}")


@dataclass(frozen=True)
class TiktokenTokenizer:
    """Byte pairs by rank, in tiktoken; special tokens in a text are text to it."""

    name: str
    vocab_size: int
    eos_id: int
    digest: str
    _encoding: Any = field(repr=False)

    def encode(self, texts: Sequence[str]) -> list["np.ndarray[Any, np.dtype[Any]]"]:
        """Return the tokens of each text, uint32. Runs on as many threads as there are CPUs."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self._encode_one, texts))

    def _encode_one(self, text: str) -> "np.ndarray[Any, np.dtype[Any]]":
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _bounded_runs(text)]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]


def load(path: Path, eos_token: str) -> TiktokenTokenizer:
    """Read the ranks at `path`.

    Raises:
        ValueError: where the file holds no ranks, tiktoken is missing, or `eos_token` is none of NAMED.
        NotImplementedError: for a SentencePiece model, which has the same name in other models.
    """
    if importlib.util.find_spec("tiktoken") is None:
        raise ValueError(f"{path.name} needs tiktoken, which is not installed; pip install 'quaver[data]'")
    import tiktoken

    content = path.read_bytes()
    ranks = _read_ranks(content, path)
    name = eos_token or "<|end_of_text|>"
    if name not in NAMED:
        raise ValueError(f"data.eos_token of tiktoken ranks must be one of {', '.join(NAMED)}, got {name!r}")
    special = {f"<|special_{number}|>": number for number in range(SPECIAL_COUNT) if number not in NAMED.values()}
    special = {token: len(ranks) + number for token, number in {**NAMED, **special}.items()}
    encoding = tiktoken.Encoding(path.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    eos_id = special[name]
    digest = hashlib.sha256(content + b"\0" + f"{SPLIT_PATTERN} {eos_id}".encode()).hexdigest()
    return TiktokenTokenizer(str(path), len(ranks) + SPECIAL_COUNT, eos_id, digest, encoding)


def _read_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    if b"<unk>" in content[:64]:  # the first piece of SentencePiece's protocol buffer
        raise NotImplementedError(
            f"data.tokenizer {str(path)!r} looks like a SentencePiece model; give the model's tokenizer.json"
        )
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"data.tokenizer {str(path)!r}, line {number}: expected base64 and a rank, as tiktoken writes them, "
                f"got {line[:40]!r}"
            ) from error
    has_bytes = all(bytes([value]) in ranks for value in range(256))
    if not has_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"data.tokenizer {str(path)!r} must rank all 256 bytes, and from 0 on without gaps")
    return ranks


def _bounded_runs(text: str) -> list[str]:
    """Cut `text` inside runs that are longer than LONGEST_RUN: the time of a merge grows with the run's square."""
    cuts = [
        cut for run in _LONG_RUNS.finditer(text) for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
