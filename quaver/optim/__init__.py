"""Optimizers whose states are stored in float8."""

from quaver.optim.adamw import Float8AdamW
from quaver.optim.groups import FLOAT32_MOMENTS, embeddings_of, float32_embeddings

__all__ = ["FLOAT32_MOMENTS", "Float8AdamW", "embeddings_of", "float32_embeddings"]
