"""Swaps `nn.Linear` for `Float8Linear` in place, and back."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields

from torch import Tensor, nn
from torch.nn.utils import parametrize

from quaver.conversion.persistent_scales import add_persistent_scales
from quaver.conversion.report import (
    FILTER_REASON_ATTRIBUTE,
    SLOW_PATH_PREFIX,
    ConversionReport,
    conversion_report,
    explain_conversion_obstacle,
    explain_dtype,
)
from quaver.conversion.roles import HEAD_NAMES, is_router
from quaver.experts.module import (
    Float8Experts,
    check_not_split,
    explain_experts_obstacle,
    get_expert_weights,
    is_experts,
    is_transposed,
)
from quaver.experts.module_weight import ModuleWeight, iter_model_weights, iter_module_weights
from quaver.foreign.transformers import drop_stale_quantization_config
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight, is_all_gather_weight
from quaver.fsdp.wrapping import make_all_gather_weights, restore_plain_weights
from quaver.linear.class_change import SubstituteModule, get_class_parts
from quaver.linear.float8_module import Float8Module, change_to_float8, restore_class
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.shared_input import share_input_casts, stop_sharing_input_casts
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.serving import serving_config
from quaver.runtime.errors import InputError, check_is_module
from quaver.runtime.module_names import find_weight_modules, format_module_name, join_names, quote_module_name
from quaver.runtime.warnings import warn_user
from quaver.torch_private.fsdp import has_fsdp_run
from quaver.weights.cast_once import is_cast_once
from quaver.weights.primary_weight import Float8PrimaryWeight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FilterDecision:
    """A filter's decision with a reason for the report. A filter may return it instead of a bool."""

    convert: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.convert


ModuleFilter = Callable[[nn.Module, str], "bool | FilterDecision"]
"""Called with a linear or experts and the fully qualified name; returns whether to convert it."""


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
    serving: str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Convert every `nn.Linear` of `module` to `Float8Linear`, and all modules of experts to `Float8Experts`, in place.

    An error leaves `module` unchanged. Modules keep their identity, parameters, hooks, attributes and training mode.
    Experts, and subclasses of `nn.Linear` that do not override `forward`, keep everything except `forward`. With
    delayed or static scaling, the linears of one call share slots (linear/scale_state.py), experts stay in high
    precision, and `sync_float8_amax_and_scale_history(model)` must run once a step. With
    `enable_fsdp_float8_all_gather` the weights become new parameters around the same memory: convert before
    `fully_shard`, and make the optimizer after both. `conversion_report(module)` lists each layer.

    A second call does not change converted layers. If its filter admits a converted layer, the config must be equal.

    Args:
        module: any module, or an `nn.Linear` itself.
        config: a config, a recipe or a recipe's name; None for the tensorwise recipe.
        serving: the inference engine whose codes the forward multiplies, a name of recipes/serving.py such as
            "vllm-per-token". `config` then applies to the backward (`serving_config`), by default the recipe of the
            engine's granularity. Layers that engines keep in high precision (lm_head, routers) are not converted.
        module_filter_fn: called with each linear or module of experts (experts/module.py) and its fully qualified
            name; false leaves it in high precision. It may return a `FilterDecision` with a reason for the report.
        include_subclasses: also convert subclasses of `nn.Linear` that override `forward`; their forward is not called.
    Returns:
        `module`. If nothing was converted, a UserWarning gives the reasons. Linears that the filter admits and that
        cannot be converted are logged at WARNING.
    Raises:
        ValueError: an unknown recipe or engine; a filter that admits layers that engines keep in high precision; an
            admitted layer that is converted with another config; a tied weight that would be gathered in float8.
        TypeError: `config`, `module` or `include_subclasses` has a wrong type; `module_filter_fn` takes other
            arguments, fails for experts or returns a tensor.
        RuntimeError: weights would be gathered in float8, and the model already ran under `fully_shard`.
    """
    config = resolve_config(config) if serving is None else serving_config(serving, config)
    check_is_module(module, argument="module")
    return convert_with_layer_configs(
        module,
        get_config=lambda _: config,
        serving=serving,
        module_filter_fn=module_filter_fn,
        include_subclasses=include_subclasses,
    )


def convert_with_layer_configs(
    module: nn.Module,
    *,
    get_config: Callable[[str], Float8LinearConfig],
    serving: str | None,
    module_filter_fn: ModuleFilter | None,
    include_subclasses: bool,
    verb: str = "convert",
) -> nn.Module:
    """Run `convert_to_float8_training` with the config that `get_config` returns for the name of each layer.

    Layers with the same config, not merely an equal one, share the slots of delayed and static scales. `verb`: what the
    caller does with linears, for the warning that there are none.
    """
    if not isinstance(include_subclasses, bool):
        raise TypeError(f"include_subclasses: expected a bool, got {include_subclasses!r}")
    if serving is not None:
        module_filter_fn = make_serving_filter(module, serving, module_filter_fn)
    plan = _plan_conversion(module, get_config, module_filter_fn, include_subclasses)
    if serving is not None:
        for layers in plan.layers:
            _check_fused(layers.linears, serving, layers.config)
    with ExitStack() as undo:
        for layers in plan.layers:
            _convert_layers(module, layers, undo)
        undo.pop_all()
    share_input_casts(module, Float8Linear)
    drop_stale_quantization_config(module)
    for child, reason in plan.reasons:
        vars(child).pop(FILTER_REASON_ATTRIBUTE, None)
        vars(child).update({FILTER_REASON_ATTRIBUTE: reason} if reason else {})
    _report_conversion(conversion_report(module), plan, verb)
    return module


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Convert all float8 linears and experts (also torchtitan's) of `module` back to their original classes, in place.

    An error leaves `module` unchanged. `module` may be, or contain, a wrapper such as DistributedDataParallel,
    torch.compile's or PEFT's. Weights that are all-gathered in float8 become new parameters: make the optimizer after
    this call. Returns `module`.

    Raises:
        RuntimeError: a linear, or experts, cannot be converted back: `fully_shard` gathers its weight in float8,
            DistributedDataParallel holds a `Float8AllGatherWeight`, its weight is a `Float8PrimaryWeight`, it is
            parametrized, or its class derives from a float8 class without `original_class`.
    """
    check_is_module(module, argument="module")
    modules = list(module.modules())
    has_ddp = any(isinstance(child, nn.parallel.DistributedDataParallel) for child in modules)
    for name, weight in iter_model_weights(module):
        _check_can_restore(weight, name, has_ddp)
    for name, child in module.named_modules():
        if isinstance(child, Float8Module):
            _check_can_restore_class(child, name)
    for child in modules:
        vars(child).pop(FILTER_REASON_ATTRIBUTE, None)
        if isinstance(child, Float8Linear | Float8Experts):
            restore_plain_weights(child)
        if isinstance(child, Float8Module):
            restore_class(child)
            if isinstance(child, SubstituteModule):
                child.to_original()
    stop_sharing_input_casts(module)
    drop_stale_quantization_config(module)
    return module


@dataclass(frozen=True)
class _LayersOfConfig:
    """The layers that get one config."""

    config: Float8LinearConfig
    linears: list[tuple[str, nn.Linear]] = field(default_factory=list)
    experts: list[tuple[str, nn.Module]] = field(default_factory=list)


@dataclass(frozen=True)
class _ConversionPlan:
    layers: list[_LayersOfConfig]
    reasons: list[tuple[nn.Module, str]]
    """The reasons for the report, by module."""
    obstacles: dict[str, list[str]]
    """The names of modules that the filter admits, by the obstacle to their conversion."""


def _plan_conversion(
    module: nn.Module,
    get_config: Callable[[str], Float8LinearConfig],
    module_filter_fn: ModuleFilter | None,
    include_subclasses: bool,
) -> _ConversionPlan:
    layers: dict[int, _LayersOfConfig] = {}
    reasons: list[tuple[nn.Module, str]] = []
    obstacles: dict[str, list[str]] = {}
    owners = find_weight_modules(module)
    for name, child in module.named_modules():
        is_linear = isinstance(child, nn.Linear)
        if not is_linear and not is_experts(child):
            continue
        decision, obstacle = apply_filter(module_filter_fn, child, name), ""
        if decision and is_linear:
            obstacle = explain_conversion_obstacle(child, include_subclasses=include_subclasses)
        elif decision:
            obstacle = explain_experts_obstacle(child, get_config(name))
        if decision:
            obstacle = obstacle or explain_dtype(child)
        if not isinstance(child, Float8Linear | Float8Experts):  # the report computes the obstacle of a linear
            reasons.append((child, decision.reason if not obstacle else "" if is_linear else obstacle))
        if obstacle:
            obstacles.setdefault(obstacle, []).append(name)
        elif decision:
            tied = [owner for owner in owners.get(id(getattr(child, "weight", None)), []) if owner != name]
            tied += [] if is_linear else _find_other_owners(module, child, name)
            config = get_config(name)
            _check_can_convert(child, name, config, tied)
            layers_of_config = layers.setdefault(id(config), _LayersOfConfig(config))
            if isinstance(child, nn.Linear):
                layers_of_config.linears.append((name, child))
            else:
                layers_of_config.experts.append((name, child))
    return _ConversionPlan([*layers.values()], reasons, obstacles)


def apply_filter(module_filter_fn: ModuleFilter | None, module: nn.Module, name: str) -> FilterDecision:
    """Call a user's filter on a linear or on experts.

    Raises:
        TypeError: the filter takes other arguments, fails for experts with an AttributeError, or returns a tensor.
    """
    if module_filter_fn is None:
        return FilterDecision(convert=True)
    try:
        decision = module_filter_fn(module, name)
    except TypeError as error:
        if _accepts_arguments(module_filter_fn, module, name):
            raise
        raise TypeError(
            f"module_filter_fn: expected a function of a module and its name, got {module_filter_fn!r}"
        ) from error
    except AttributeError as error:
        if isinstance(module, nn.Linear):
            raise
        raise TypeError(
            f"module_filter_fn fails for {quote_module_name(name)}, a {type(module).__name__} with 3-D weights: "
            f"{error}; if it is written for linears, return False for modules other than nn.Linear, or handle experts"
        ) from error
    if isinstance(decision, FilterDecision):
        return decision
    if isinstance(decision, Tensor):
        raise TypeError(f"module_filter_fn: expected a bool or a FilterDecision, got a tensor of {decision.dtype}")
    return FilterDecision(convert=bool(decision), reason="" if decision else "filter")


def _accepts_arguments(function: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:  # it is not callable, or takes other arguments
        return False
    return True


def make_serving_filter(root: nn.Module, serving: str, module_filter_fn: ModuleFilter | None) -> ModuleFilter:
    """Return a filter that leaves out heads and routers, which engines keep in high precision."""

    def decide(module: nn.Module, name: str) -> FilterDecision:
        parent, _, leaf = name.rpartition(".")
        decision = apply_filter(module_filter_fn, module, name)
        if leaf not in HEAD_NAMES and not is_router(root.get_submodule(parent), leaf):
            return decision
        if module_filter_fn is not None and decision:
            raise InputError(
                f"serving={serving!r}: engines keep {name} in high precision, but it would be converted; leave it out "
                "(module_filter_fn, layer_recipes)"
            )
        if module_filter_fn is not None:
            return decision
        return FilterDecision(convert=False, reason=f"high precision in {serving}")

    return decide


def _check_fused(linears: list[tuple[str, nn.Linear]], serving: str, config: Float8LinearConfig) -> None:
    names = {name for name, _ in linears}
    for name, _ in linears if config.casts.weight.row.is_tensorwise else ():
        parent, dot, leaf = name.rpartition(".")
        siblings = next((group for group in config.shared_inputs if leaf in group), ())
        fused = [sibling for sibling in siblings if f"{parent}{dot}{sibling}" in names]
        if len(fused) > 1:
            raise InputError(
                f"serving={serving!r}: engines fuse {', '.join(fused)} of {parent or 'the model'} into one linear with "
                "one scale, and training has one for each; expected an engine with scales of rows or blocks"
            )


def _find_other_owners(root: nn.Module, experts: nn.Module, name: str) -> list[str]:
    weights = set(map(id, get_expert_weights(experts).values()))
    parameters = root.named_parameters(remove_duplicate=False)
    names = [parameter_name for parameter_name, parameter in parameters if id(parameter) in weights]
    return [parameter_name for parameter_name in names if parameter_name.rpartition(".")[0] != name]


def _check_can_convert(module: nn.Module, name: str, config: Float8LinearConfig, tied: list[str]) -> None:
    if isinstance(module, Float8Module) and module.float8_config != config:
        difference = _describe_difference(module.float8_config, config)
        raise ValueError(
            f"{quote_module_name(name)} is already converted with {difference}; filter it out, or "
            "call convert_to_high_precision first"
        )
    weights = {"weight": module.weight} if isinstance(module, nn.Linear) else get_expert_weights(module)
    transposed = not isinstance(module, nn.Linear) and is_transposed(module)
    for weight in weights.values():
        if not isinstance(weight, Float8Tensor):
            continue
        if mismatch := weight.explain_cast_mismatch(config.casts.weight, transposed=transposed):
            raise ValueError(f"{format_module_name(name)}: {mismatch}")
    if tied and config.enable_fsdp_float8_all_gather:
        raise InputError(
            f"the weight of {format_module_name(name)} is tied to {', '.join(tied)}, so it cannot be gathered in "
            "float8; untie them, filter the layer out, or turn enable_fsdp_float8_all_gather off"
        )


def _describe_difference(old: Float8LinearConfig, new: Float8LinearConfig) -> str:
    """Return the recipes of two configs; or the fields that differ, if both are of one recipe or one is of none."""
    old_recipe, new_recipe = old.recipe_name, new.recipe_name
    if old_recipe is not None and new_recipe is not None and old_recipe is not new_recipe:
        return f"{old_recipe.value}, asked for {new_recipe.value}"
    differing = [part.name for part in fields(old) if getattr(old, part.name) != getattr(new, part.name)]
    return f"another config; they differ in {', '.join(differing)}"


def _convert_layers(module: nn.Module, layers: _LayersOfConfig, undo: ExitStack) -> None:
    """Convert the layers of one config; `undo` restores them. Converted layers get the slots they lack."""
    config = layers.config
    converted: list[tuple[str, Float8Linear]] = []
    for name, linear in layers.linears:
        if not isinstance(linear, Float8Linear):
            linear = change_to_float8(linear, Float8Linear, config)
            undo.callback(restore_class, linear)
        converted.append((name, linear))
    weights = [(name, ModuleWeight(linear)) for name, linear in converted]
    for name, experts in layers.experts:
        if not isinstance(experts, Float8Experts):
            undo.callback(restore_class, change_to_float8(experts, Float8Experts, config))
        weights += [(f"{name}.{weight.name}", weight) for weight in iter_module_weights(experts)]
    without_slots = [(name, linear) for name, linear in converted if linear.scale_slots is None]
    plain = [(name, weight) for name, weight in weights if not is_all_gather_weight(weight)]
    for _, linear in without_slots:
        undo.callback(setattr, linear, "scale_slots", None)
    for _, weight in plain:
        undo.callback(weight.module.register_parameter, weight.name, weight.module._parameters.get(weight.name))
        undo.callback(restore_plain_weights, weight.module)
    add_persistent_scales(module, without_slots, config)
    if config.enable_fsdp_float8_all_gather:
        if plain and has_fsdp_run(module):
            raise RuntimeError("the model ran under fully_shard already; convert before its first forward")
        make_all_gather_weights(plain)


def _check_can_restore(weight: ModuleWeight, name: str, has_ddp: bool) -> None:
    is_whole = weight.local_tensor is weight.parameter
    if is_cast_once(weight):
        raise RuntimeError(
            f"{quote_module_name(name)} cannot be converted back inside cast_weights_once; leave the scope before that"
        )
    if isinstance(weight.parameter, Float8PrimaryWeight):
        raise RuntimeError(
            f"{quote_module_name(name)} cannot be converted back: its weight is a float8 primary weight; load the "
            "model's state_dict, which holds the masters, into a model in high precision"
        )
    if isinstance(weight.local_tensor, FrozenFloat8Weight) and not is_whole:
        obstacle = "fully_shard shards its frozen float8 weight"
    elif is_all_gather_weight(weight) and not isinstance(weight.parameter, Float8AllGatherWeight):
        obstacle = "fully_shard gathers its weight in float8"
    elif is_all_gather_weight(weight) and has_ddp:
        obstacle = "DistributedDataParallel holds its weight, which is a Float8AllGatherWeight"
    else:
        return
    raise RuntimeError(f"{quote_module_name(name)} cannot be converted back: {obstacle}; convert back before that")


def _check_can_restore_class(module: Float8Module, name: str) -> None:
    name = quote_module_name(name)
    if parametrize.is_parametrized(module):
        raise RuntimeError(f"{name} cannot be converted back: it is parametrized; remove the parametrizations first")
    if issubclass(original := get_class_parts(module).original, Float8Module):
        cls, base = original.__name__, original.__bases__[0].__name__
        raise RuntimeError(
            f"{name} cannot be converted back: its class {cls} derives from {base} without saying what it converts; "
            f"set {cls}.original_class to the class in high precision, as Float8Linear.original_class is nn.Linear"
        )
    if isinstance(module, Float8Experts):
        check_not_split(module)


def _report_conversion(report: ConversionReport, plan: _ConversionPlan, verb: str) -> None:
    logger.info(report.summary())
    for note in report.notes:
        if not note.startswith(SLOW_PATH_PREFIX):  # slow paths were logged
            logger.warning(note)
    problem = "" if plan.layers else report.explain_no_conversion(verb=verb)
    if problem:
        warn_user(problem)
    for obstacle, names in plan.obstacles.items():
        if obstacle not in problem:
            layers = "layer stays" if len(names) == 1 else "layers stay"
            logger.warning("%d %s in high precision (%s): %s", len(names), layers, join_names(names), obstacle)
