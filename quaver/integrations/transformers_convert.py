"""`prepare_model_for_float8`: converts models of transformers and PEFT, GPT-2's `Conv1D` included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from quaver.conversion.check import is_torchao_linear
from quaver.conversion.convert import FilterDecision, ModuleFilter, apply_filter, convert_to_float8_training
from quaver.conversion.layer_recipes import LayerRecipes, convert_layers
from quaver.integrations import torchao as shim
from quaver.integrations.transformers_conv1d import Conv1DLinear, find_conv1ds, to_linears
from quaver.integrations.transformers_roles import find_linear_roles
from quaver.kernels.native_mm import ALIGNMENT
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName


def prepare_model_for_float8(
    model: nn.Module,
    config: Float8LinearConfig | Float8LinearRecipeName | LayerRecipes | str | None = None,
    *,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Convert a model of transformers or PEFT, or any other module, to float8 training, in place; returns `model`.

    Output heads, adapters of PEFT, routers of mixtures (transformers_roles.py), and linears with a dimension that is
    not a multiple of 16 stay in high precision. `conversion_report(model)` lists each with its reason.

    A `Conv1D`, as in GPT-2, becomes float8 unless PEFT has wrapped it. Its state dict does not change
    (transformers_conv1d.py).

    Args:
        model: a `PreTrainedModel`, a `PeftModel` or any other module.
        config: as for `convert_to_float8_training`; or a recipe for each layer, `LayerRecipes.read(path)`.
        module_filter_fn: as for `convert_to_float8_training`; called with the layers that this function would convert.
        include_subclasses: as for `convert_to_float8_training`; Falcon needs it.
    Raises:
        RuntimeError: torchao has converted the model, or Accelerate's settings would let torchao convert it.
    """
    if any(is_torchao_linear(module) for module in model.modules()):
        raise RuntimeError("torchao has converted this model: load it again, and leave the conversion to quaver")
    if shim.get_accelerate_precision() == "fp8" and not shim.is_installed():
        raise RuntimeError(
            "Accelerate's mixed_precision=fp8 would replace quaver's linears by torchao's: set it to bf16, or call "
            "quaver.integrations.torchao.install() first and leave the conversion to Accelerate"
        )
    options: dict[str, Any] = {
        "module_filter_fn": make_float8_filter(model, module_filter_fn),
        "include_subclasses": include_subclasses,
    }
    with treat_conv1ds_as_linears(model):
        if isinstance(config, LayerRecipes):
            return convert_layers(model, config, **options)
        return convert_to_float8_training(model, config=config, **options)


def make_float8_filter(model: nn.Module, module_filter_fn: ModuleFilter | None) -> ModuleFilter:
    """Return the filter of `prepare_model_for_float8`, combined with `module_filter_fn`."""
    roles = find_linear_roles(model)

    def decide(module: nn.Module, name: str) -> bool | FilterDecision:
        if name in roles:
            return FilterDecision(convert=False, reason=roles[name])
        if isinstance(module, nn.Linear) and (module.in_features % ALIGNMENT or module.out_features % ALIGNMENT):
            return FilterDecision(convert=False, reason=f"shape: a dimension is not a multiple of {ALIGNMENT}")
        return apply_filter(module_filter_fn, module, name)

    return decide


@contextmanager
def treat_conv1ds_as_linears(model: nn.Module) -> Iterator[None]:
    """Make each `Conv1D` a linear in the block. At its end, linears that are not in float8 become `Conv1D`s again."""
    linears = to_linears(find_conv1ds(model))
    try:
        yield
    finally:
        for linear in linears:
            if type(linear) is Conv1DLinear:
                linear.to_original()
