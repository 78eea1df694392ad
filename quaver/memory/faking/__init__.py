"""Lets a step of training run without numbers: fake tensors, and what stands in for the rest of the machine."""
