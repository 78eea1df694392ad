"""Tokenizers of Hugging Face's `tokenizers`: a tokenizer.json, and what stands beside it."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that may name its eos_token, as transformers writes them."""

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
"""What models call the special token that ends a document: Llama 3, GPT-2, Llama 2, Gemma, and others' variant."""


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A fast tokenizer; special tokens in a text are text to it, and it adds none."""

    name: str
    vocab_size: int
    eos_id: int
    digest: str
    _tokenizer: Any = field(repr=False)

    def encode(self, texts: Sequence[str]) -> list["np.ndarray[Any, np.dtype[Any]]"]:
        """Return the tokens of each text, uint32. Runs on several threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def load(path: Path, eos_token: str) -> HuggingFaceTokenizer:
    """Read the tokenizer.json at `path`. Raises ValueError where it is none, or its end of document is unknown."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(f"{path.name} needs tokenizers, which is not installed; pip install 'quaver[data]'")
    from tokenizers import Tokenizer

    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise ValueError(f"data.tokenizer {str(path)!r} is not a tokenizer of Hugging Face: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    eos_id = _eos_id(tokenizer, path, eos_token)
    digest = hashlib.sha256(content + b"\0" + str(eos_id).encode()).hexdigest()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return HuggingFaceTokenizer(str(path), size, eos_id, digest, tokenizer)


def _eos_id(tokenizer: Any, path: Path, eos_token: str) -> int:
    name = eos_token or _named_by_companion(path) or _named_by_special_tokens(tokenizer, path)
    found = tokenizer.token_to_id(name)
    if found is None:
        raise ValueError(f"the end-of-document token {name!r} is no token of {str(path)!r}; set data.eos_token to one")
    return int(found)


def _named_by_companion(path: Path) -> str:
    for companion in COMPANIONS:
        beside = path.with_name(companion)
        if beside.is_file():
            try:
                entry = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{str(beside)!r} is not the JSON object it should be: {error}") from error
            name = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(name, str) and name:
                return name
    return ""


def _named_by_special_tokens(tokenizer: Any, path: Path) -> str:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    named = [name for name in END_NAMES if name in special]
    if len(named) != 1:
        which = f"several: {', '.join(named)}" if named else f"none of {', '.join(END_NAMES)}"
        raise ValueError(f"{str(path)!r} does not say which token ends a document ({which}); set data.eos_token")
    return named[0]
