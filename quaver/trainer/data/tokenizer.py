"""From text to tokens: the byte tokenizer, and which of the others a config names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quaver.trainer.config import Data, Model, require
from quaver.trainer.config.data import BYTES
from quaver.trainer.data import huggingface, tiktoken_ranks

Tokens = np.ndarray[Any, np.dtype[Any]]
"""1-d, unsigned."""


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def name(self) -> str:
        """For the reader of a run folder."""

    @property
    def vocab_size(self) -> int:
        """Every token is below."""

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""

    @property
    def digest(self) -> str:
        """Equal only for tokenizers that give the same tokens."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text. No text gives a special token, whatever it spells."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Bytes of UTF-8; a 0 byte, which no text holds, ends a document, so 256 tokens are enough."""

    name: str = BYTES
    vocab_size: int = 256
    eos_id: int = 0
    digest: str = BYTES

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text, uint8."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]


def load_tokenizer(data: Data) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: a file that is none, a package that is missing, or an end-of-document token that is not found.
        NotImplementedError: for a SentencePiece model.
    """
    if data.tokenizer == BYTES:
        return ByteTokenizer()
    path = _tokenizer_file(data.tokenizer)
    load = huggingface.load if path.suffix == ".json" else tiktoken_ranks.load
    return load(path, data.eos_token)


def check_vocabulary(tokenizer: Tokenizer, data: Data, model: Model) -> None:
    """Raise ValueError where the model has fewer tokens than the tokenizer."""
    size = tokenizer.vocab_size
    why = (
        "because text is read as bytes"
        if data.tokenizer == BYTES
        else f"the tokens of data.tokenizer {data.tokenizer!r}"
    )
    require(
        model.vocab_size >= size, "model.vocab_size", f"at least {size}, {why}", model.vocab_size, f"set it to {size}"
    )


def _tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        ranks = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
        candidates = [file for file in (path / "tokenizer.json", *ranks) if file.is_file()]
        if not candidates:
            raise FileNotFoundError(f"data.tokenizer {name!r} is a folder without a tokenizer.json or tiktoken ranks")
        return candidates[0]
    if not path.is_file():
        raise FileNotFoundError(f"data.tokenizer {name!r} does not exist; give {BYTES}, a file or a folder")
    return path
