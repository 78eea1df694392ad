"""Turns text into tokens: bytes of UTF-8, or a tokenizer.json through the library `tokenizers`."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quaver.lab.settings import Data, Model, require
from quaver.lab.settings.data import BYTE_TOKENIZER
from quaver.lab.settings.fields import expand_user
from quaver.runtime.errors import InputError

Tokens = np.ndarray[Any, np.dtype[Any]]
"""1-d, unsigned."""

COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files in the folder of a tokenizer.json that may name its eos_token, as transformers writes them."""

EOS_TOKEN_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
"""Names of the special token that ends a document: Llama 3, GPT-2, Llama 2, Gemma, and another variant."""


@dataclass(frozen=True)
class Tokenizer:
    """`encode` returns the tokens of each text. No text yields a special token, even if it spells one."""

    name: str
    vocab_size: int
    """All tokens are below it."""
    eos_id: int
    """The token that ends a document."""
    digest: str
    """Equal only for tokenizers that yield the same tokens."""
    encode: Callable[[Sequence[str]], list[Tokens]] = field(repr=False)


def load_tokenizer(data: Data) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Raises:
        FileNotFoundError: if there is no such file.
        InputError: for a file that is not a tokenizer.json, a missing package, or an unknown end-of-document token.
    """
    if data.tokenizer == BYTE_TOKENIZER:
        return make_byte_tokenizer()
    path = _find_tokenizer_file(data.tokenizer)
    if importlib.util.find_spec("tokenizers") is None:
        raise InputError(f"{path.name} needs tokenizers, which is not installed; pip install 'quaver[data]'")
    return _load_json(path, path.read_bytes(), data.eos_token)


def check_vocabulary(tokenizer: Tokenizer, data: Data, model: Model) -> None:
    """Raise InputError if the model has fewer tokens than the tokenizer."""
    size, given = tokenizer.vocab_size, model.vocab_size
    is_bytes = data.tokenizer == BYTE_TOKENIZER
    reason = "because text is read as bytes" if is_bytes else f"the tokens of data.tokenizer {data.tokenizer!r}"
    require(given >= size, "model.vocab_size", f"at least {size}, {reason}", given, f"set it to {size}")


def make_byte_tokenizer() -> Tokenizer:
    """Return the tokenizer to bytes of UTF-8. A 0 byte, which no text contains, ends a document: 256 tokens suffice."""
    return Tokenizer(
        BYTE_TOKENIZER, 256, 0, BYTE_TOKENIZER, lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    )


def _find_tokenizer_file(name: str) -> Path:
    path = expand_user(name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"data.tokenizer {name!r} is a folder without a tokenizer.json")
    if not path.is_file():
        raise FileNotFoundError(
            f"data.tokenizer {name!r} does not exist; give {BYTE_TOKENIZER}, a tokenizer.json or its folder"
        )
    if path.suffix != ".json":
        raise InputError(
            f"data.tokenizer must be {BYTE_TOKENIZER}, a Hugging Face tokenizer.json or its folder, got {name!r}; "
            "the tokenizer.json of the same model has the tokens of a tokenizer.model or tiktoken file"
        )
    return path


def _load_json(path: Path, content: bytes, eos_token: str) -> Tokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    try:
        inner = HuggingFaceTokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise InputError(f"data.tokenizer {str(path)!r} is not a tokenizer of Hugging Face: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # text that spells a special token is text
    name = eos_token or _find_name_in_companions(path) or _find_special_name(inner, path)
    eos_id = inner.token_to_id(name)
    if eos_id is None:
        raise InputError(
            f"the end-of-document token {name!r} is not a token of {str(path)!r}; set data.eos_token to one"
        )

    def encode(texts: Sequence[str]) -> list[Tokens]:
        try:
            encodings = inner.encode_batch_fast(list(texts), add_special_tokens=False)  # on several threads
        except Exception as error:  # its unk_token is not in its vocabulary
            raise InputError(f"data.tokenizer {str(path)!r} cannot encode the text: {error}") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    # another release of `tokenizers` may split the same text otherwise
    digest = hashlib.sha256(content + b"\0" + f"{eos_id} {version('tokenizers')}".encode()).hexdigest()
    size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(str(path), size, eos_id, digest, encode)


def _find_name_in_companions(path: Path) -> str:
    for file in (path.with_name(companion) for companion in COMPANION_FILES):
        if file.is_file():
            try:
                entry = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise InputError(f"{str(file)!r} is not a JSON object: {error}") from error
            name = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(name, str) and name:
                return name
    return ""


def _find_special_name(inner: Any, path: Path) -> str:
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    named = [name for name in EOS_TOKEN_NAMES if name in special]
    if len(named) != 1:
        problem = f"several: {', '.join(named)}" if named else f"none of {', '.join(EOS_TOKEN_NAMES)}"
        raise InputError(f"{str(path)!r} does not say which token ends a document ({problem}); set data.eos_token")
    return named[0]
