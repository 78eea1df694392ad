"""Benchmarks that a user runs: `quaver bench`."""
