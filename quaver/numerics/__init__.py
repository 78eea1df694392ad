"""Measures the numerics of a model's float8 matmuls while it trains; `monitor` in monitor.py is the way in."""
