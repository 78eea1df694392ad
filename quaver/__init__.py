"""quaver: float8 training for PyTorch, with the same numbers on every device.

from quaver import Float8LinearConfig, convert_to_float8_training
convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
"""

from typing import TYPE_CHECKING, Any

from quaver.conversion.check import assert_float8_training
from quaver.conversion.convert import FilterDecision, convert_to_float8_training, convert_to_high_precision
from quaver.conversion.freeze import freeze_to_float8
from quaver.conversion.high_precision import set_high_precision_matmuls
from quaver.conversion.layer_recipes import LayerRecipes
from quaver.conversion.persistent_scales import (
    Float8ScalingState,
    TensorScaleReport,
    calibrate_float8_static_scales,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.conversion.report import ConversionReport, conversion_report
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp, reduce_gradients_in_float8
from quaver.experts.function import float8_grouped_mm
from quaver.linear.function import float8_linear
from quaver.linear.module import Float8Linear
from quaver.numerics import monitor
from quaver.recipes.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScaleCalculationMode,
    ScalingGranularity,
    ScalingType,
)
from quaver.recipes.serving import serving_config
from quaver.roofline.auto_filter import auto_filter_for_recipe
from quaver.runtime.slow_paths import error_on_slow_path
from quaver.weights.cast_once import cast_weights_once
from quaver.weights.frozen_modules import FrozenFloat8Experts, FrozenFloat8Linear
from quaver.weights.primary import use_float8_primary_weights

if TYPE_CHECKING:
    from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput


__version__ = "1.0.0"

__all__ = [
    "CastConfig",
    "ConversionReport",
    "DelayedScalingConfig",
    "FilterDecision",
    "Float8ColwiseParallel",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8RowwiseParallel",
    "Float8ScalingState",
    "FrozenFloat8Experts",
    "FrozenFloat8Linear",
    "LayerRecipes",
    "PrepareFloat8ModuleInput",
    "ScaleCalculationMode",
    "ScalingGranularity",
    "ScalingType",
    "TensorScaleReport",
    "assert_float8_training",
    "auto_filter_for_recipe",
    "calibrate_float8_static_scales",
    "cast_weights_once",
    "conversion_report",
    "convert_to_float8_training",
    "convert_to_high_precision",
    "error_on_slow_path",
    "float8_grouped_mm",
    "float8_linear",
    "float8_scaling_state",
    "freeze_to_float8",
    "monitor",
    "precompute_float8_dynamic_scale_for_fsdp",
    "reduce_gradients_in_float8",
    "serving_config",
    "set_high_precision_matmuls",
    "sync_float8_amax_and_scale_history",
    "use_float8_primary_weights",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name not in ("Any", "TYPE_CHECKING"))})


def __getattr__(name: str) -> Any:
    """Import public names of torch.distributed.tensor lazily, because it takes as long to import as torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quaver import distributed

    return getattr(distributed, name)
