"""`torchao.float8.config`."""

from quaver.recipes.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from quaver.recipes.formats import E4M3, E5M2

e4m3_dtype, e5m2_dtype = E4M3.dtype, E5M2.dtype

__all__ = [
    "CastConfig",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "e4m3_dtype",
    "e5m2_dtype",
]
