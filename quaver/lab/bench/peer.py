"""Converts linears and casts tensors with torchao.float8, with which results are optionally compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.foreign.torchao import hide_torchao_import_logs
from quaver.recipes.config import Float8LinearRecipeName
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.runtime.devices import is_cuda_device

PEER_RECIPES = (
    Float8LinearRecipeName.TENSORWISE,
    Float8LinearRecipeName.ROWWISE,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP,
)
"""The recipes that torchao also has."""


def is_peer_recipe(recipe: str) -> bool:
    """Return whether torchao also has this recipe."""
    return canonicalize_recipe(recipe) in [name.value for name in PEER_RECIPES]


def make_torchao_linear(linear: nn.Module, recipe: str, *, device: torch.device) -> nn.Module:
    """Convert one linear with torchao. On a CPU torchao emulates."""
    return next(convert_with_torchao(nn.Sequential(linear), recipe, device=device).children())


def convert_with_torchao(module: nn.Module, recipe: str, *, device: torch.device) -> nn.Module:
    """Convert the linears in a module with torchao, in place. On a CPU torchao emulates."""
    with hide_torchao_import_logs():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not is_cuda_device(device))
        return convert_to_float8_training(module, config=config)


def make_torchao_cast(float8_dtype: torch.dtype, dim: int | None, *, power_of_2: bool) -> Callable[[Tensor], Tensor]:
    """Return torchao's dynamic cast of a matrix to float8 codes, as its linears use it: tensorwise or along `dim`."""
    with hide_torchao_import_logs():
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

    options: dict[str, Any] = {
        "scaling_granularity": ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE,
        "axiswise_dim": {None: None, 0: 0, 1: -1}[dim],  # torchao accepts only -1 for the last dim
        "round_scales_to_power_of_2": power_of_2,
    }
    gemms = LinearMMConfig()
    return lambda hp: hp_tensor_to_float8_dynamic(hp, float8_dtype, gemms, **options)._data
