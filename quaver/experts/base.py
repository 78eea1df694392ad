"""`Float8Grouped`: the base class of modules whose grouped matmuls run in float8."""

from __future__ import annotations

from quaver.experts.grouped_gemm import describe_grouped_backends
from quaver.linear.float8_module import Float8Module


class Float8Grouped(Float8Module):
    """A converted module with 3-D weights. Its subclasses multiply."""

    _describe_backends = staticmethod(describe_grouped_backends)
