"""`make_converted_view`: the converted model that an export reads in place of a high-precision or adapted one.

The view has modules that share the parameters, buffers and attributes of `model`, and converts those. `model` itself
does not change and its memory is not copied. The view leaves out PEFT's adapters, which must be merged into their base
layers, so tensors have the names of the base model. Modules of FSDP2 are plain modules in the view.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from quaver.conversion.convert import FilterDecision, ModuleFilter, convert_to_float8_training
from quaver.conversion.roles import LM_HEAD, ROUTER_NAMES
from quaver.experts.module import get_expert_weights, is_experts
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import find_tied_modules
from quaver.torch_private.dtensor import is_dtensor
from quaver.torch_private.fsdp import find_fsdp_module_class, get_param_dtype

Recipe = Float8LinearConfig | Float8LinearRecipeName | str

DEFAULT_FILTER = (LM_HEAD,)
"""Linears whose full name contains one of these stay in high precision."""


class ConvertedView(NamedTuple):
    """The model that an export reads, made by `make_converted_view`."""

    model: nn.Module
    forward_dtypes: dict[int, torch.dtype]
    """The `param_dtype` with which FSDP2 gathers a parameter, by the id of the parameter."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT wrapped `model` or modules of it."""
    return hasattr(model, "get_base_model") or any(_is_adapted(module) for module in model.modules())


def make_converted_view(
    model: nn.Module, recipe: Recipe | None, module_filter_fn: ModuleFilter | None
) -> ConvertedView:
    """Return a view of `model`, converted to `recipe` if there is one.

    See the top of the file, and `iter_float8_weights` for arguments and errors.
    """
    fsdp_class = find_fsdp_module_class()
    for module in model.modules():
        if fsdp_class is not None and isinstance(module, fsdp_class):
            module.reshard()
    if hasattr(model, "get_base_model") and any(_is_adapted(module) for module in model.modules()):
        base: Any = model.get_base_model
        model = base()
    dtypes: dict[int, torch.dtype] = {}
    view = ConvertedView(_copy_module(getattr(model, "_orig_mod", model), {}, dtypes, None), dtypes)
    if recipe is None:
        return view
    config = resolve_config(recipe)
    if config.has_persistent_scales:
        name = recipe if isinstance(recipe, str) else config.short_str()
        raise InputError(
            f"recipe: expected one whose scales follow from the weights alone, got {name}; convert the model to it and "
            "train, or calibrate, or give another"
        )
    filter_fn = module_filter_fn or make_name_filter(DEFAULT_FILTER, find_tied_modules(view.model))
    convert_to_float8_training(
        view.model, config=replace(config, enable_fsdp_float8_all_gather=False), module_filter_fn=filter_fn
    )
    return view


def make_name_filter(
    filter_fqns: Sequence[str], tied: Collection[str] = ()
) -> Callable[[nn.Module, str], FilterDecision]:
    """Return a filter that leaves out routers, `tied` linears, and those whose name contains one of `filter_fqns`."""

    def decide(module: nn.Module, name: str) -> FilterDecision:
        part = next((part for part in filter_fqns if part in name), None)
        if part is not None:
            return FilterDecision(convert=False, reason=f"filter: name contains {part!r}")
        if name in tied:
            return FilterDecision(convert=False, reason="its weight is tied")
        is_router = name.rpartition(".")[2] in ROUTER_NAMES
        return FilterDecision(convert=not is_router, reason="a router of experts" if is_router else "")

    return decide


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merged")


def _unwrap_adapters(module: Any, name: str) -> nn.Module:
    """Return the module inside PEFT's layers, which computes the forward after a merge."""
    while _is_adapted(module):
        if not module.merged:
            raise ValueError(
                f"{name} has adapters of PEFT that are not merged: call model.merge_adapter() before, and "
                "model.unmerge_adapter() after the export"
            )
        module = module.base_layer
    if hasattr(module, "original_module") and hasattr(module, "active_adapters"):
        saved_modules = getattr(module, "modules_to_save", None)
        if saved_modules is None:
            raise NotImplementedError(
                f"{name} is a {type(module).__name__} of PEFT, which merge_adapter() leaves as it is; export "
                "model.merge_and_unload()"
            )
        active = module.active_adapters
        module = saved_modules[active[0]] if active else module.original_module
    return module


def _copy_module(
    module: nn.Module,
    copies: dict[int, nn.Module],
    dtypes: dict[int, torch.dtype],
    dtype: torch.dtype | None,
    name: str = "the model",
) -> nn.Module:
    """Copy `module` and the modules below it. The copies share tensors; their dicts of hooks and attributes are new.

    Args:
        copies: the copies so far, by the id of the module; shared modules stay shared.
        dtypes: filled as `ConvertedView.forward_dtypes`.
        dtype: the `param_dtype` of the FSDP2 module above `module`.
    """
    module = _unwrap_adapters(module, name)
    if id(module) in copies:
        return copies[id(module)]
    cls: type = type(module)
    fsdp_class = find_fsdp_module_class()
    if fsdp_class is not None and isinstance(module, fsdp_class):
        dtype = get_param_dtype(module)
        cls = next(base for base in cls.__mro__ if not issubclass(base, fsdp_class))
    copied: Any = object.__new__(cls)
    copies[id(module)] = copied
    attributes = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    attributes.pop("forward", None)  # an export runs no forward
    vars(copied).update(attributes)
    if is_experts(module) and all(map(is_dtensor, get_expert_weights(module).values())):  # a DTensor has all experts
        copied.num_experts, copied._is_expert_parallel = next(iter(get_expert_weights(module).values())).shape[0], False
    if dtype is not None:
        dtypes.update((id(parameter), dtype) for parameter in module._parameters.values() if parameter is not None)
    prefix = "" if name == "the model" else f"{name}."
    for child_name, child in module._modules.items():
        if child is not None:
            copied._modules[child_name] = _copy_module(child, copies, dtypes, dtype, f"{prefix}{child_name}")
    return copied
