"""Fake tensors for a training step, and the results that they assume for operators that depend on values."""
