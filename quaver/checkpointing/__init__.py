"""Activation checkpointing that knows float8: which results a block saves, and where its recomputation stops."""

from quaver.checkpointing.policy import MODES, apply_activation_checkpointing

__all__ = ["MODES", "apply_activation_checkpointing"]
