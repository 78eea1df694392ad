"""`auto_filter_for_recipe`: a filter that converts the linears for which the cost model predicts a speedup."""

from __future__ import annotations

from collections.abc import Callable, Collection
from numbers import Real

import torch
from torch import nn

from quaver.conversion.convert import FilterDecision
from quaver.kernels.native_mm import ALIGNMENT
from quaver.recipes.config import Float8LinearRecipeName
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.cost import find_unsupported_scales, predict_linear_cost
from quaver.roofline.device_specs import DeviceSpec, find_machine_spec, find_spec_of_device, require_device_spec
from quaver.runtime.errors import InputError


def auto_filter_for_recipe(
    recipe: Float8LinearRecipeName | str,
    *,
    tokens: int = 8192,
    device: str | torch.device | None = None,
    skip: tuple[str, ...] = (),
    min_speedup: float = 1.05,
) -> Callable[[nn.Module, str], FilterDecision]:
    """Make a filter for `convert_to_float8_training` that skips linears too small to gain, and reports its estimate.

    It skips experts of any size, because no grouped matmul of a GPU was measured. To convert experts too, use
    `lambda module, name: is_experts(module) or estimate(module, name)`, with `is_experts` from `quaver.experts.module`
    and `estimate` returned by this function.

    Args:
        recipe: a recipe's name.
        tokens: rows of the linears' inputs per forward, on one device.
        device: the device of the training, a name such as "H100" or a torch.device. None for this machine's GPU if it
            is known, else H100.
        skip: parts of names of layers to leave in high precision.
        min_speedup: the smallest predicted speedup for which a linear is converted.
    Raises:
        ValueError: an unknown recipe or device, a device that does not multiply float8 with the recipe's scales, or
            another argument of a wrong type or range.
    """
    recipe = canonicalize_recipe(recipe)
    if isinstance(skip, str):
        raise ValueError(f"skip: expected a tuple of names, got {skip!r}; give ({skip!r},)")
    if not isinstance(skip, Collection) or not all(isinstance(part, str) for part in skip):
        raise ValueError(f"skip: expected a tuple of names, got {skip!r}")
    if not isinstance(min_speedup, Real) or not min_speedup >= 0:
        raise ValueError(f"min_speedup: expected a number, 0 or more, got {min_speedup!r}")
    spec = _choose_spec(device)
    if spec.float8_tflops is None:
        raise InputError(f"device: expected one that multiplies float8, got {spec.name}, where no layer gains")
    if find_unsupported_scales(spec, recipe):
        raise InputError(
            f"recipe: expected one whose scales {spec.name} multiplies, got {recipe}, with which no layer gains"
        )
    predict_linear_cost(tokens, 16, 16, recipe, spec)  # raises now for arguments that would fail at every layer

    def decide(module: nn.Module, name: str) -> FilterDecision:
        matched = next((part for part in skip if part in name), None)
        if matched is not None:
            return FilterDecision(convert=False, reason=f"filter: name contains {matched!r}")
        if not isinstance(module, nn.Linear):
            return FilterDecision(
                convert=False, reason="experts: no float8 grouped matmul was measured, so no gain is estimated"
            )
        k, n = module.in_features, module.out_features
        if k % ALIGNMENT or n % ALIGNMENT:
            return FilterDecision(
                convert=False, reason=f"shape: {k} x {n} is not a multiple of {ALIGNMENT}, padding would cost more"
            )
        speedup = predict_linear_cost(tokens, k, n, recipe, spec).speedup
        estimate = f"estimated {speedup:.2f}x on {spec.name} at {tokens} tokens"
        return FilterDecision(convert=speedup >= min_speedup, reason=estimate)

    return decide


def _choose_spec(device: str | torch.device | None) -> DeviceSpec:
    if isinstance(device, str):
        return require_device_spec(device, option="device")
    if device is None:
        return find_machine_spec() or require_device_spec("H100", option="device")
    if not isinstance(device, torch.device):
        raise ValueError(f"device: expected a name or a torch.device, got {device!r}")
    return find_spec_of_device(device) or require_device_spec(str(device), option="device")
