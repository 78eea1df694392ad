"""`torchao.float8`: the names of the package itself."""

from quaver.compat.float8.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from quaver.compat.float8.float8_linear_utils import (
    _auto_filter_for_recipe,
    convert_to_float8_training,
    linear_requires_sync,
    sync_float8_amax_and_scale_history,
)
from quaver.compat.float8.float8_tensor import Float8Tensor
from quaver.compat.float8.float8_training_tensor import Float8TrainingTensor
from quaver.compat.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp
from quaver.compat.float8.types import FP8Granularity

__all__ = [
    "CastConfig",
    "DelayedScalingConfig",
    "FP8Granularity",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8Tensor",
    "Float8TrainingTensor",
    "ScalingGranularity",
    "ScalingType",
    "_auto_filter_for_recipe",
    "convert_to_float8_training",
    "linear_requires_sync",
    "precompute_float8_dynamic_scale_for_fsdp",
    "sync_float8_amax_and_scale_history",
]
