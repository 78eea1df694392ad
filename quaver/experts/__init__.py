"""Mixtures of experts in float8: grouped casts and matmuls, and the modules that use them."""
