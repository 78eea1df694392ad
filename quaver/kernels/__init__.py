"""One file per operation that PyTorch does not have, or has too slow."""
