"""FSDP2 with float8: the all-gather of weights and the reduce-scatter of gradients."""
