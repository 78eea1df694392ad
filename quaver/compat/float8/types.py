"""`torchao.float8.types`: the granularity as a type annotation."""

from quaver.recipes.config import ScalingGranularity as FP8Granularity

__all__ = ["FP8Granularity"]
