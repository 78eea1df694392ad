"""torchtitan 0.3: float8 linears and experts by converters of the model's config, or by an override.

    model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    model_registry("30B-A3B", converters=[..., Float8GroupedExpertsConverter.Config(recipe_name="rowwise")])
    --override.imports 'quaver.integrations.torchtitan.float8_linear={"recipe_name": "rowwise"}'

A converted config keeps the fields of `Linear.Config`, `param_init` and `sharding_config` among them, and builds
torchtitan's own linear, converted: `init_states` and `parallelize` treat it as before. torchtitan 0.2 needs no
converter: run it under `python -m quaver.integrations.torchao`.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from quaver.conversion.convert import convert_to_float8_training
from quaver.experts.seam import arguments_of, to_float8_grouped_mm
from quaver.kernels.native_blocks import ALIGNMENT
from quaver.recipes.config import resolve_config


@dataclass(kw_only=True, slots=True)
class Float8LinearConfig(Linear.Config):
    """A `Linear.Config` that builds a float8 linear."""

    recipe_name: str = "rowwise"
    """A recipe that scales dynamically: torchtitan has no event after the optimizer's step."""
    emulate: bool = False
    """Multiply exactly, also where the hardware multiplies float8."""

    def build(self, **kwargs: Any) -> Any:
        config = replace(resolve_config(self.recipe_name), emulate=self.emulate)
        return convert_to_float8_training(Linear.Config.build(self, **kwargs), config=config)


class Float8LinearConverter(ModelConfigConverter):
    """Converts the linears of a model's config."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The fields of torchtitan's own converter."""

        recipe_name: str = "rowwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router"])
        """Linears whose name contains one of these stay in high precision."""
        emulate: bool = False
        model_compile_enabled: bool = False
        """Has no effect: the same linears run eager and compiled, with and without `emulate`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace each `Linear.Config` that can run in float8; return the model's config.

        Raises ValueError if none can, with the reasons.
        """
        linears = [*model_config.traverse(Linear.Config)]
        skipped = []
        for name, linear, parent, attribute in linears:
            reason = _obstacle(linear) or next(
                (f"filter {part}" for part in self.config.filter_fqns if part in name), ""
            )
            if reason:
                skipped.append(f"{name} ({reason})")
            else:
                converted = _float8(linear, self.config.recipe_name, self.config.emulate)
                model_config = _put(converted, parent, attribute, model_config)
        if len(skipped) == len(linears):
            raise ValueError(f"0 of {len(linears)} linears can run in float8: {', '.join(skipped)}")
        logger.info(
            f"float8 ({self.config.recipe_name}): {len(linears) - len(skipped)} of {len(linears)} linears; "
            f"in high precision: {', '.join(skipped) or 'none'}"
        )
        return model_config


class Float8GroupedExpertsConverter(ModelConfigConverter):
    """Converts the grouped experts of a model's config, whatever the arguments of their `_grouped_mm` are called."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The fields of torchtitan's own converter, and the recipe."""

        recipe_name: str = "rowwise"
        emulate: bool = False
        model_compile_enabled: bool = False
        """Has no effect: the same experts run eager and compiled."""
        pad_multiple: int | None = None
        """Has no effect: groups have any size."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace each config of experts that have `_grouped_mm`; return the model's config.

        Raises ValueError if there are none, or if their arguments are unknown.
        """
        config = replace(resolve_config(self.config.recipe_name), emulate=self.config.emulate)
        found = [
            each
            for each in model_config.traverse(Module.Config, recurse=True)
            if hasattr(each[1]._owner, "_grouped_mm")
        ]
        if not found:
            raise ValueError("expected a model with grouped experts, got one without")
        for _, experts, parent, attribute in found:
            arguments_of(experts._owner)
            converted = derive(experts, _float8_experts_config(typing.cast(Any, type(experts))), float8=config)
            model_config = _put(converted, parent, attribute, model_config)
        logger.info(f"float8 ({self.config.recipe_name}): {len(found)} modules of grouped experts")
        return model_config


@functools.cache
def _float8_experts_config(base: Any) -> Any:
    """A config like `base` that builds its experts in float8."""

    @dataclass(kw_only=True, slots=True)
    class Float8ExpertsConfig(base):
        float8: Any = None

        def build(self, **kwargs: Any) -> Any:
            return to_float8_grouped_mm(base.build(self, **kwargs), self.float8)

    return Float8ExpertsConfig


def _put(converted: Any, parent: Any, attribute: Any, model_config: Any) -> Any:
    """Put a config at its place in `model_config`, and return that; the root has no parent."""
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
def float8_linear(linear: Any, *, recipe_name: str = "rowwise", emulate: bool = False) -> Any:
    """The linears of attention, of the feed-forward and of shared experts in float8."""
    return linear if _obstacle(linear) else _float8(linear, recipe_name, emulate)


def _obstacle(linear: Any) -> str:
    """Why a `Linear.Config` stays in high precision; "" where it need not."""
    if type(linear) is not Linear.Config:
        return f"{type(linear).__qualname__} has a forward of its own"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        return f"shape: a dimension is no multiple of {ALIGNMENT}"
    return ""


def _float8(linear: Any, recipe_name: str, emulate: bool) -> Float8LinearConfig:
    if resolve_config(recipe_name).has_persistent_scales:
        raise ValueError(
            f"recipe_name: expected one that scales dynamically, got {recipe_name}; torchtitan has no event to sync in"
        )
    return derive(linear, Float8LinearConfig, recipe_name=recipe_name, emulate=emulate)
