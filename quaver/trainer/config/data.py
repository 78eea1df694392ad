"""[data] and [validation]: the text, how it becomes tokens, and how often a part of it measures the model."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from quaver.trainer.config.require import require, require_default, require_positive

BYTES = "bytes"
"""The tokenizer that needs no file."""

ON_CORRUPT = ("skip", "refuse")


@dataclass(frozen=True)
class Data:
    """The text and its tokens; see docs/data.md."""

    path: str = "stdlib"
    """A text, .jsonl, .jsonl.gz or .parquet file, a folder of some, or stdlib: the sources of Python's own library
    (short: --data)."""
    field: str = "text"
    """The field of JSONL objects, or the column of Parquet files, that holds the text."""
    on_corrupt: Annotated[str, arg(help=f"One of {', '.join(ON_CORRUPT)}: what becomes of what cannot be read.")] = (
        "skip"
    )
    tokenizer: str = BYTES
    """bytes (256 tokens), a Hugging Face tokenizer.json, a tiktoken rank file as Llama 3's, or a folder with one."""
    eos_token: str = ""
    """The token that ends a document; empty for the one that the tokenizer's own files name."""
    cache_folder: str = ""
    """Where tokens are kept; empty for quaver/tokens in $XDG_CACHE_HOME or ~/.cache."""
    document_mask: bool = False
    """Attention does not cross the end of a document."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path", "stdlib, a file or a folder", self.path)
        require(bool(self.field), "data.field", "the name of a field", self.field)
        require(bool(self.tokenizer), "data.tokenizer", f"{BYTES}, a file or a folder", self.tokenizer)
        choices = ", ".join(ON_CORRUPT)
        require(self.on_corrupt in ON_CORRUPT, "data.on_corrupt", f"one of {choices}", self.on_corrupt)
        if self.tokenizer == BYTES:
            require_default(
                "data", self, "eos_token", "data.tokenizer is a file", "with bytes a 0 byte ends a document"
            )


@dataclass(frozen=True)
class Validation:
    """The same sequences of the validation split, every time."""

    freq: int = 50
    """Steps between two validations; the last step always has one."""
    steps: int = 8
    """Batches of local_batch_size sequences in one validation."""
    high_precision_too: bool = False
    """Also report validation_loss_hp: the same weights with every linear in high precision. Not with tensor parallelism
    or float8.enable_fsdp_float8_all_gather, whose inputs and weights travel in float8."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "freq", "steps")
