"""Optimizers whose states are stored in float8."""

from quaver.optim.adamw import FLOAT32_MOMENTS, Float8AdamW, float32_embeddings

__all__ = ["FLOAT32_MOMENTS", "Float8AdamW", "float32_embeddings"]
