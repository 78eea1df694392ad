"""`torchao.float8.float8_utils`: the names that scripts and tests import."""

import torch
from torch import Tensor

from quaver.recipes.config import Float8LinearConfig, resolve_config
from quaver.recipes.scaling import EPS, amax_to_quant_scale, cast_to_float8


def amax_to_scale(amax: Tensor, float8_dtype: torch.dtype, round_scales_to_power_of_2: bool = False) -> Tensor:
    """Compute the quant_scale of `amax`, float32."""
    return amax_to_quant_scale(amax, float8_dtype, power_of_2=round_scales_to_power_of_2)


def to_fp8_saturated(x: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Cast `x` to float8. Overflows become the largest number of the format; inf becomes NaN, unlike in torchao."""
    return cast_to_float8(x, torch.ones((), dtype=torch.float32, device=x.device), float8_dtype)


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Compute the SQNR of `y` against the reference `x` in dB."""
    return 20 * torch.log10(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(x - y))


def config_has_stateful_scaling(config: Float8LinearConfig) -> bool:
    """Return whether any operand has delayed or static scaling."""
    return resolve_config(config).has_persistent_scales


__all__ = ["EPS", "amax_to_scale", "compute_error", "config_has_stateful_scaling", "to_fp8_saturated"]
