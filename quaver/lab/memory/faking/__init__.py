"""Fake tensors for a training step, and the parts of the machine that are simulated with them."""
