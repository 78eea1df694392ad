"""Optimizers whose states are stored in float8."""

from quaver.optim.adamw import Float8AdamW
from quaver.optim.combined import CombinedOptimizer, copy_states
from quaver.optim.muon import Float8Muon
from quaver.optim.param_groups import FLOAT32_MOMENTS, find_embedding_weights, make_param_groups

__all__ = [
    "FLOAT32_MOMENTS",
    "CombinedOptimizer",
    "Float8AdamW",
    "Float8Muon",
    "find_embedding_weights",
    "copy_states",
    "make_param_groups",
]
