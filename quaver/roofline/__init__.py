"""Predicts the speedup of float8: a cost model of linears on known devices, and the filter that uses it."""
