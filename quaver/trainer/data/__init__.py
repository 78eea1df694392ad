"""The data of a run: sources (text, JSONL or Parquet files) become cached tokens, which are dealt out as batches."""

from quaver.trainer.data.load import load_data
from quaver.trainer.data.samples import Batch, TokenData, TokenSplit

__all__ = ["Batch", "TokenData", "TokenSplit", "load_data"]
