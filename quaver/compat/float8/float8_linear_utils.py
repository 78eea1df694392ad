"""`torchao.float8.float8_linear_utils`."""

from collections.abc import Callable, Sequence

from torch import nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.conversion.persistent_scales import sync_float8_amax_and_scale_history
from quaver.kernels.native_mm import ALIGNMENT
from quaver.linear.module import Float8Linear
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, ScalingType, resolve_config


def linear_requires_sync(config: Float8LinearConfig) -> bool:
    """Return whether `sync_float8_amax_and_scale_history` must be called once a step."""
    return any(cast.scaling_type is ScalingType.DELAYED for cast in resolve_config(config).casts.list_casts())


def get_float8_layers(model: nn.Module) -> list[Float8Linear]:
    """Return the Float8Linears of `model`, for `sync_float8_amax_and_scale_history(model, fp8_layers=...)`."""
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def swap_linear_layers(
    module: nn.Module,
    from_float_func: Callable[[nn.Linear], nn.Linear],
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace every `nn.Linear` that the filter admits by `from_float_func(linear)`; return the module.

    A root `nn.Linear` is not changed: its replacement is returned. Unlike `convert_to_float8_training`, this does not
    set up a float8 all-gather or persistent scales.
    """
    swapped: dict[nn.Module, nn.Linear] = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and (module_filter_fn is None or module_filter_fn(child, name)):
            swapped[child] = from_float_func(child)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(module, module)


def _auto_filter_for_recipe(
    recipe: Float8LinearRecipeName | str, filter_fqns: Sequence[str]
) -> Callable[[nn.Module, str], bool]:
    """Make torchao's filter, which skips names that contain one of `filter_fqns`, and linears too small for an H100.

    `quaver.auto_filter_for_recipe` estimates the gain of each linear instead, for every recipe and device.

    Raises:
        ValueError: an unknown recipe, or one string for `filter_fqns`.
        NotImplementedError: torchao has no thresholds for the recipe.
    """
    recipe = Float8LinearRecipeName(recipe)
    if isinstance(filter_fqns, str):
        raise ValueError(f"filter_fqns: expected a list of names, got {filter_fqns!r}; give [{filter_fqns!r}]")
    if recipe not in (Float8LinearRecipeName.TENSORWISE, Float8LinearRecipeName.ROWWISE):
        raise NotImplementedError(
            f"recipe: expected tensorwise or rowwise, got {recipe.value}; use quaver.auto_filter_for_recipe for it"
        )

    def admits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or any(part in name for part in filter_fqns):
            return False
        n, k = module.weight.shape
        if n % ALIGNMENT or k % ALIGNMENT:
            return False
        if recipe is Float8LinearRecipeName.TENSORWISE:
            return n > 1024 or k > 4096
        return n > 2048 and k > 1024 and (n > 4096 or k > 2048)

    return admits


__all__ = [
    "_auto_filter_for_recipe",
    "convert_to_float8_training",
    "get_float8_layers",
    "linear_requires_sync",
    "swap_linear_layers",
    "sync_float8_amax_and_scale_history",
]
