"""The data of a run: text, JSONL or Parquet files become cached tokens, and these become batches."""

from quaver.lab.data.load import load_data
from quaver.lab.data.samples import Batch, TokenData, TokenSplit

__all__ = ["Batch", "TokenData", "TokenSplit", "load_data"]
