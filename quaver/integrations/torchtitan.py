"""torchtitan 0.3: converters of the model's config, or an override, for float8 linears and experts.

    model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    model_registry("30B-A3B", converters=[..., Float8GroupedExpertsConverter.Config(recipe_name="rowwise")])
    --override.imports 'quaver.integrations.torchtitan.float8_linear={"recipe_name": "rowwise"}'

A converted config keeps the fields of `Linear.Config`, including `param_init` and `sharding_config`, and builds a
`Float8TitanLinear`, torchtitan's linear in float8. `init_states`, `parallelize` and LoRAConverter treat it as a linear.
torchtitan sees both configs as quantized (`has_quantization`), and does not report MFU. torchtitan 0.2 needs no
converter: run it under `python -m quaver.integrations.torchao`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.components.quantization import Float8Linear as TorchAOLinear
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.components.quantization.float8 import _float8_experts_cache
from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from quaver.conversion.convert import convert_to_float8_training
from quaver.experts.grouped_mm_method import match_arguments, to_float8_grouped_mm
from quaver.kernels.native_mm import ALIGNMENT
from quaver.linear.module import Float8Linear
from quaver.recipes.config import resolve_config

_QuantizedConfig: Any = Linear.Config if TorchAOLinear is None else TorchAOLinear.Config
"""The base of a linear's config that torchtitan counts as quantized, which exists only if torchao is installed."""


class Float8TitanLinear(Float8Linear, Linear):
    """torchtitan's linear in float8. LoRAConverter can derive from it."""

    original_class = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(_QuantizedConfig):
        """A `Linear.Config` that builds a float8 linear."""

        recipe_name: str = "rowwise"
        """A recipe with dynamic scaling: torchtitan has no event after the optimizer's step."""
        emulate: bool = False
        """Multiply exactly, even if the hardware has float8 units."""
        enable_fsdp_float8_all_gather: bool = False
        """FSDP2 all-gathers the weight in float8."""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        float8 = replace(
            resolve_config(config.recipe_name),
            emulate=config.emulate,
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        )
        self._init_float8(float8)
        convert_to_float8_training(self, config=float8)  # makes the weight a Float8AllGatherWeight


class Float8LinearConverter(QuantizationConverter):
    """Converts the linears of a model's config."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The fields of torchtitan's converter, and the float8 all-gather, which torchtitan 0.3 removed."""

        recipe_name: str = "rowwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router"])
        """Linears whose name contains one of these stay in high precision."""
        emulate: bool = False
        enable_fsdp_float8_all_gather: bool = False
        """FSDP2 all-gathers the weights in float8: one byte per element, two with the recipe `rowwise`."""
        model_compile_enabled: bool = False
        """Has no effect: the same linears run eagerly and compiled, with and without `emulate`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace each `Linear.Config` that can run in float8, and return the model's config.

        Raises ValueError if none can, with the reasons.
        """
        linears, skipped, config = [*model_config.traverse(Linear.Config)], [], self.config
        for name, linear, parent, attribute in linears:
            filters = (f"filter {part}" for part in config.filter_fqns if part in name)
            if reason := _explain_obstacle(linear) or next(filters, ""):
                skipped.append(f"{name} ({reason})")
                continue
            converted = _convert_config(
                linear, config.recipe_name, config.emulate, config.enable_fsdp_float8_all_gather
            )
            model_config = _replace_config(converted, parent, attribute, model_config)
        if len(skipped) == len(linears):
            raise ValueError(f"0 of {len(linears)} linears can run in float8: {', '.join(skipped)}")
        logger.info(
            f"float8 ({config.recipe_name}): {len(linears) - len(skipped)} of {len(linears)} linears; "
            f"in high precision: {', '.join(skipped) or 'none'}"
        )
        return model_config


class Float8GroupedExpertsConverter(QuantizationConverter):
    """Converts the grouped experts of a model's config, with any names of the arguments of their `_grouped_mm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The fields of torchtitan's converter, and the recipe."""

        recipe_name: str = "rowwise"
        emulate: bool = False
        model_compile_enabled: bool = False
        """Has no effect: the same experts run eagerly and compiled."""
        pad_multiple: int | None = None
        """Has no effect: groups have any size."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace each config of experts with `_grouped_mm`, and return the model's config.

        Raises ValueError if there are none, or if the arguments of `_grouped_mm` are unknown.
        """
        config = replace(resolve_config(self.config.recipe_name), emulate=self.config.emulate)
        modules = model_config.traverse(Module.Config, recurse=True)
        grouped = [entry for entry in modules if hasattr(entry[1]._owner, "_grouped_mm")]
        if not grouped:
            raise ValueError("expected a model with grouped experts, got one without")
        for _, experts, parent, attribute in grouped:
            match_arguments(experts._owner)
            converted = derive(experts, _make_float8_experts(experts._owner).Config, float8=config)
            model_config = _replace_config(converted, parent, attribute, model_config)
        logger.info(f"float8 ({self.config.recipe_name}): {len(grouped)} modules of grouped experts")
        return model_config


@functools.cache
def _make_float8_experts(base: Any) -> Any:
    """Return a subclass of the experts `base` whose config builds float8 experts."""

    class Float8TitanExperts(base):
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            float8: Any = None

            def build(self, **kwargs: Any) -> Any:
                return to_float8_grouped_mm(base.Config.build(derive(self, base.Config), **kwargs), self.float8)

    # torchtitan finds quantized experts in this cache. Its own converter never looks up this key.
    _float8_experts_cache[Float8TitanExperts] = Float8TitanExperts
    return Float8TitanExperts


def _replace_config(converted: Any, parent: Any, attribute: Any, model_config: Any) -> Any:
    """Put a converted config in its place, and return the model's config. The root has no parent."""
    if parent is None:
        return converted
    if isinstance(parent, list):
        parent[attribute] = converted
    else:
        setattr(parent, attribute, converted)
    return model_config


@override(
    target=Linear.Config,
    fqns=["*layers.*.attention.*", "*layers.*.feed_forward.*", "*layers.*.shared_experts.*"],
    description="float8 linears by quaver",
    exact=True,
)
def float8_linear(
    linear: Any,
    *,
    recipe_name: str = "rowwise",
    emulate: bool = False,
    enable_fsdp_float8_all_gather: bool = False,
) -> Any:
    """Convert the config of a linear in attention, feed-forward or shared experts to float8 if its shape allows."""
    if _explain_obstacle(linear):
        return linear
    return _convert_config(linear, recipe_name, emulate, enable_fsdp_float8_all_gather)


def _explain_obstacle(linear: Any) -> str:
    if type(linear) is not Linear.Config:
        return f"{type(linear).__qualname__} is not exactly Linear.Config and may override its forward"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        return f"shape: a dimension is not a multiple of {ALIGNMENT}"
    return ""


def _convert_config(
    linear: Any, recipe_name: str, emulate: bool, enable_fsdp_float8_all_gather: bool
) -> Float8TitanLinear.Config:
    if resolve_config(recipe_name).has_persistent_scales:
        raise ValueError(
            f"recipe_name: expected one that scales dynamically, got {recipe_name}; torchtitan has no event to sync in"
        )
    return derive(
        linear,
        Float8TitanLinear.Config,
        recipe_name=recipe_name,
        emulate=emulate,
        enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
    )
