"""Compiles without kernels, and follows the buffers of compiled code."""
