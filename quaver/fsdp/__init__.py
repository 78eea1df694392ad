"""Data parallelism with float8: FSDP2's all-gather of weights, and the reduction of gradients in FSDP2 and DDP."""
