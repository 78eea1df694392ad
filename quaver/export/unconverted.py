"""A model that is not in float8, or has adapters, as the converted model that an export reads.

`converted_view(model, ...)` makes modules that share the parameters, buffers and attributes of `model`, and converts
those. `model` stays as it is, trains on, and its memory is not copied. Without the adapters of PEFT, which are merged
into their base layers, tensors have the names of the base model. FSDP2's modules are plain ones there.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from quaver.conversion.convert import ModuleFilter, convert_to_float8_training
from quaver.experts.module import is_experts, weights_of
from quaver.export.source import DEFAULT_FILTER, skip_names
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.runtime.names import tied_modules
from quaver.torch_private.dtensor import is_dtensor
from quaver.torch_private.fsdp import fsdp_module_class, param_dtype

Recipe = Float8LinearConfig | Float8LinearRecipeName | str


class ConvertedView(typing.NamedTuple):
    """What an export reads in place of a model."""

    model: nn.Module
    forward_dtypes: dict[int, torch.dtype]
    """The dtype in which FSDP2 gathers a parameter for the forward, by its id, where its policy has one."""


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT wrapped `model`, or put adapters around modules of it."""
    return hasattr(model, "get_base_model") or any(_is_adapted(each) for each in model.modules())


def converted_view(model: nn.Module, recipe: Recipe | None, module_filter_fn: ModuleFilter | None) -> ConvertedView:
    """See the top of the file; for the arguments and the errors see `iter_float8_weights`."""
    sharded = fsdp_module_class()
    for each in model.modules():
        if sharded is not None and isinstance(each, sharded):
            each.reshard()
    if hasattr(model, "get_base_model") and any(_is_adapted(each) for each in model.modules()):
        model = typing.cast(Callable[[], nn.Module], model.get_base_model)()
    made = ConvertedView(model, {})
    made = made._replace(model=_share(getattr(model, "_orig_mod", model), {}, made.forward_dtypes, None))
    if recipe is None:
        return made
    config = resolve_config(recipe)
    if config.has_persistent_scales:
        got = recipe if isinstance(recipe, str) else config.short_str()
        raise ValueError(
            f"recipe: expected one whose scales follow from the weights alone, got {got}; convert the model to it and "
            "train, or calibrate, or give another"
        )
    kept = module_filter_fn or skip_names(DEFAULT_FILTER, tied_modules(made.model))
    convert_to_float8_training(
        made.model, config=replace(config, enable_fsdp_float8_all_gather=False), module_filter_fn=kept
    )
    return made


def _is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT around another module."""
    return hasattr(module, "base_layer") and hasattr(module, "merged")


def _without_adapters(module: nn.Module, name: str) -> nn.Module:
    """The module that PEFT put its own around; what a forward with merged adapters computes is in it.

    Raises:
        ValueError: adapters are not merged.
        NotImplementedError: PEFT trains the module in a way that it cannot merge.
    """
    while _is_adapted(module):
        if not module.merged:
            raise ValueError(
                f"{name} has adapters of PEFT that are not merged: call model.merge_adapter() before, and "
                "model.unmerge_adapter() after the export"
            )
        module = typing.cast(nn.Module, module.base_layer)
    if hasattr(module, "original_module") and hasattr(module, "active_adapters"):
        trained = getattr(module, "modules_to_save", None)
        if trained is None:
            raise NotImplementedError(
                f"{name} is a {type(module).__name__} of PEFT, which merge_adapter() leaves as it is; export "
                "model.merge_and_unload()"
            )
        active = typing.cast("list[str]", module.active_adapters)
        module = typing.cast(nn.Module, trained[active[0]] if active else module.original_module)
    return module


def _share(
    module: nn.Module,
    known: dict[int, nn.Module],
    dtypes: dict[int, torch.dtype],
    dtype: torch.dtype | None,
    name: str = "the model",
) -> nn.Module:
    """A module like `module`, and so on below it, with the same tensors, and hooks and attributes in dicts of its own.

    Args:
        known: the copies so far, by the id of the module; shared modules stay shared.
        dtypes: of `ConvertedView`, which this fills.
        dtype: in which FSDP2 gathers the parameters of `module`, unless it is a unit of FSDP2 itself.
    """
    module = _without_adapters(module, name)
    if id(module) in known:
        return known[id(module)]
    cls: type = type(module)
    sharded = fsdp_module_class()
    if sharded is not None and isinstance(module, sharded):
        dtype = param_dtype(module)
        cls = next(each for each in cls.__mro__ if not issubclass(each, sharded))
    made: nn.Module = object.__new__(cls)
    known[id(module)] = made
    own = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    own.pop("forward", None)  # no forward runs
    vars(made).update(own)
    if is_experts(module) and all(map(is_dtensor, weights_of(module).values())):  # whole, over whichever ranks
        made.num_experts, made._is_expert_parallel = next(iter(weights_of(module).values())).shape[0], False  # type: ignore[assignment]
    if dtype is not None:
        dtypes.update((id(each), dtype) for each in module._parameters.values() if each is not None)
    prefix = "" if name == "the model" else f"{name}."
    for child_name, child in module._modules.items():
        if child is not None:
            made._modules[child_name] = _share(child, known, dtypes, dtype, f"{prefix}{child_name}")
    return made
