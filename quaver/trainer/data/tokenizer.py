"""From text to tokens: bytes, a tokenizer.json through `tokenizers`, or ranks in tiktoken's format through `tiktoken`.

A rank file has lines `base64-of-the-bytes rank` and says neither how text is split nor which special tokens follow.
Both are taken from the tokenizer that Meta published with Llama 3 in April 2024: SPLIT_PATTERN; 256 special tokens
after the ranks (128,000 in Llama 3, so 128,256 tokens), of which NAMED have one name in every release; runs of more
than 25,000 characters that are all space, or all not, are cut there.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quaver.trainer.config import Data, Model, require
from quaver.trainer.config.data import BYTES
from quaver.trainer.config.settings import expanded

Tokens = np.ndarray[Any, np.dtype[Any]]
"""1-d, unsigned."""

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files in the folder of a tokenizer.json that may name its eos_token, as transformers writes them."""

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
"""Names of the special token that ends a document: Llama 3, GPT-2, Llama 2, Gemma, and another variant."""

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

LONGEST_RUN = 25_000
"""Llama 3's limit; without one, tiktoken fails on a million spaces ("Max stack size exceeded for backtracking")."""

_LONG_RUNS = re.compile(rf"(?<!\S)\S{{{LONGEST_RUN + 1},}}|(?<!\s)\s{{{LONGEST_RUN + 1},}}")


@dataclass(frozen=True)
class Tokenizer:
    """`encode` returns the tokens of each text. No text yields a special token, even if it spells one."""

    name: str
    vocab_size: int
    """Every token is below."""
    eos_id: int
    """The token that ends a document."""
    digest: str
    """Equal only for tokenizers that yield the same tokens."""
    encode: Callable[[Sequence[str]], list[Tokens]] = field(repr=False)


def load_tokenizer(data: Data) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that is not a tokenizer, a missing package, or an unknown end-of-document token.
        NotImplementedError: for a SentencePiece model.
    """
    if data.tokenizer == BYTES:
        return byte_tokenizer()
    path = _tokenizer_file(data.tokenizer)
    package, load = ("tokenizers", _load_json) if path.suffix == ".json" else ("tiktoken", _load_ranks)
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{path.name} needs {package}, which is not installed; pip install 'quaver[data]'")
    return load(path, path.read_bytes(), data.eos_token)


def check_vocabulary(tokenizer: Tokenizer, data: Data, model: Model) -> None:
    """Raise ValueError if the model has fewer tokens than the tokenizer."""
    size = tokenizer.vocab_size
    is_bytes = data.tokenizer == BYTES
    why = "because text is read as bytes" if is_bytes else f"the tokens of data.tokenizer {data.tokenizer!r}"
    require(
        model.vocab_size >= size, "model.vocab_size", f"at least {size}, {why}", model.vocab_size, f"set it to {size}"
    )


def byte_tokenizer() -> Tokenizer:
    """The bytes of UTF-8. A 0 byte, which no text contains, ends a document, so 256 tokens are enough."""
    return Tokenizer(BYTES, 256, 0, BYTES, lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts])


def _tokenizer_file(name: str) -> Path:
    path = expanded(name)
    if path.is_dir():
        ranks = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
        candidates = [file for file in (path / "tokenizer.json", *ranks) if file.is_file()]
        if not candidates:
            raise FileNotFoundError(f"data.tokenizer {name!r} is a folder without a tokenizer.json or tiktoken ranks")
        return candidates[0]
    if not path.is_file():
        raise FileNotFoundError(f"data.tokenizer {name!r} does not exist; give {BYTES}, a file or a folder")
    return path


# ---- tokenizer.json --------------------------------------------------------------------------------------------------


def _load_json(path: Path, content: bytes, eos_token: str) -> Tokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    try:
        inner = HuggingFaceTokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise ValueError(f"data.tokenizer {str(path)!r} is not a tokenizer of Hugging Face: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # text that spells a special token is text
    name = eos_token or _named_by_companion(path) or _named_by_special_tokens(inner, path)
    eos_id = inner.token_to_id(name)
    if eos_id is None:
        raise ValueError(
            f"the end-of-document token {name!r} is not a token of {str(path)!r}; set data.eos_token to one"
        )

    def encode(texts: Sequence[str]) -> list[Tokens]:
        encodings = inner.encode_batch_fast(list(texts), add_special_tokens=False)  # on several threads
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    digest = hashlib.sha256(content + b"\0" + str(eos_id).encode()).hexdigest()
    size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(str(path), size, eos_id, digest, encode)


def _named_by_companion(path: Path) -> str:
    for file in (path.with_name(companion) for companion in COMPANIONS):
        if file.is_file():
            try:
                entry = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{str(file)!r} is not a JSON object: {error}") from error
            name = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(name, str) and name:
                return name
    return ""


def _named_by_special_tokens(inner: Any, path: Path) -> str:
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    named = [name for name in END_NAMES if name in special]
    if len(named) != 1:
        which = f"several: {', '.join(named)}" if named else f"none of {', '.join(END_NAMES)}"
        raise ValueError(f"{str(path)!r} does not say which token ends a document ({which}); set data.eos_token")
    return named[0]


# ---- ranks in tiktoken's format --------------------------------------------------------------------------------------


def _load_ranks(path: Path, content: bytes, eos_token: str) -> Tokenizer:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    if b"<unk>" in content[:64]:  # the first piece of SentencePiece's protocol buffer
        raise NotImplementedError(
            f"data.tokenizer {str(path)!r} looks like a SentencePiece model; give the model's tokenizer.json"
        )
    try:
        # tiktoken caches files by path: the hash makes it notice a file that changed.
        ranks = load_tiktoken_bpe(str(path), hashlib.sha256(content).hexdigest())
    except ValueError as error:
        raise ValueError(
            f"data.tokenizer {str(path)!r}: expected lines of base64 and a rank, as tiktoken writes them; "
            f"tiktoken says: {str(error)[:80]}"
        ) from error
    has_bytes = all(bytes([value]) in ranks for value in range(256))
    if not has_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"data.tokenizer {str(path)!r} must rank all 256 bytes, and from 0 on without gaps")
    name = eos_token or "<|end_of_text|>"
    if name not in NAMED:
        raise ValueError(f"data.eos_token of tiktoken ranks must be one of {', '.join(NAMED)}, got {name!r}")
    reserved = {f"<|special_{number}|>": number for number in range(SPECIAL_COUNT) if number not in NAMED.values()}
    special = {token: len(ranks) + number for token, number in {**NAMED, **reserved}.items()}
    inner = tiktoken.Encoding(path.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode_one(text: str) -> Tokens:
        parts = [inner.encode_to_numpy(part, disallowed_special=()) for part in bounded_runs(text)]
        return np.concatenate(parts)

    def encode(texts: Sequence[str]) -> list[Tokens]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(encode_one, texts))

    digest = hashlib.sha256(content + b"\0" + f"{SPLIT_PATTERN} {special[name]}".encode()).hexdigest()
    return Tokenizer(str(path), len(ranks) + SPECIAL_COUNT, special[name], digest, encode)


def bounded_runs(text: str) -> list[str]:
    """Cut `text` inside runs of space, or of other characters, that are longer than LONGEST_RUN."""
    cuts = [
        cut for run in _LONG_RUNS.finditer(text) for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
