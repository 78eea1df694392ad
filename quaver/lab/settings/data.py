"""[data] and [validation]: the text, how it becomes tokens, and how often the model is validated on a part of it."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from quaver.lab.settings.fields import AtLeast1, OneOf, Settings, setting

BYTE_TOKENIZER = "bytes"
"""The tokenizer that needs no file."""


@dataclass(frozen=True)
class Data(Settings, section="data"):
    """The text and its tokens; see docs/data.md."""

    path: str = setting(
        "stdlib",
        "A .txt, .jsonl, .jsonl.gz or .parquet file, a folder of them, or stdlib: the sources of Python's library "
        "(short: --data).",
    )
    field: str = setting("text", "The JSONL field or Parquet column that holds the text.")
    on_corrupt: Annotated[str, OneOf(("skip", "refuse"))] = setting(
        "skip", "Whether to skip or to refuse unreadable records."
    )
    tokenizer: str = setting(BYTE_TOKENIZER, "bytes (256 tokens), a Hugging Face tokenizer.json, or a folder with one.")
    eos_token: str = setting("", "Token that ends a document; empty for the tokenizer's own.")
    cache_folder: str = setting("", "Cache of tokens; empty for quaver/tokens in $XDG_CACHE_HOME or ~/.cache.")
    document_mask: bool = setting(False, "Attention does not cross the end of a document.")

    def check(self) -> None:
        """Raise InputError for empty strings, and for a token that the tokenizer does not read."""
        self.require(bool(self.path), "path", "stdlib, a file or a folder")
        self.require(bool(self.field), "field", "the name of a field")
        self.require(bool(self.tokenizer), "tokenizer", f"{BYTE_TOKENIZER}, a file or a folder")
        if self.tokenizer == BYTE_TOKENIZER:
            hint = "with bytes a 0 byte ends a document"
            self.require_default("eos_token", unless="data.tokenizer is a file", hint=hint)


@dataclass(frozen=True)
class Validation(Settings, section="validation"):
    """Always the same sequences of the validation split."""

    freq: AtLeast1 = setting(50, "Steps between two validations; the last step always has one.")
    steps: Annotated[int, Ge(1), Le(100_000)] = setting(8, "Batches of local_batch_size sequences in one validation.")
    high_precision_too: bool = setting(False, "Also report validation_loss_hp, with every linear in high precision.")
