"""Writes documents as JSON lines and Parquet, and trains a small tokenizer, for tests of the data pipeline."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [f"document {number}: " + "word " * (number % 7) + "\N{SNOWMAN}" for number in range(200)]
FOX = "the quick brown fox jumps over the lazy dog"
ENGLISH = [FOX, "float8 has four bits of exponent\n\n  and a sign", "0123456789"]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    lines = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def write_parquet(
    path: Path, texts: list[str | None], field: str = "text", kind: pa.DataType | None = None, **options: object
) -> None:
    values = pa.array(texts, pa.string()).cast(kind or pa.string())
    parquet.write_table(pa.table({"id": list(range(len(texts))), field: values}), path, **options)


def train_tokenizer(path: Path, special: list[str], vocab_size: int = 400) -> Tokenizer:
    """Return a small byte-level BPE that adds a first token, cuts and pads, as a file for a model might tell it to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(ENGLISH * 10, trainer)
    first = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return tokenizer
