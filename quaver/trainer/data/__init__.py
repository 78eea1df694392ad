"""The data of a run: sources (files of text, JSONL or Parquet) become tokens, kept in a cache, dealt out as batches."""

from quaver.trainer.data.batch import Batch
from quaver.trainer.data.load import load_data
from quaver.trainer.data.samples import TokenData, TokenSplit

__all__ = ["Batch", "TokenData", "TokenSplit", "load_data"]
