"""`Float8GroupedModule`: the base class of modules whose grouped matmuls run in float8."""

from __future__ import annotations

from quaver.experts.function import explain_config_obstacle
from quaver.experts.gemm import describe_grouped_backends
from quaver.linear.float8_module import Float8Module
from quaver.recipes.config import Float8LinearConfig


class Float8GroupedModule(Float8Module):
    """A converted module with 3-D weights. Its subclasses multiply."""

    _describe_backends = staticmethod(describe_grouped_backends)

    def check_config(self, config: Float8LinearConfig) -> None:
        if obstacle := explain_config_obstacle(config):
            raise ValueError(f"config: {obstacle}")
