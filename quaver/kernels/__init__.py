"""Casts and matmuls that PyTorch lacks or that are too slow there, one file per operation."""
