"""A recipe for each layer: one config for most of a model, others for a few, high precision for the rest.

    [float8]
    recipe_name = "tensorwise"
    layer_recipes = ["model.layers.0.mlp.down_proj=blockwise", "model.layers.3.mlp.down_proj=high_precision"]

`prepare_model_for_float8(model, LayerRecipes.read(path))` and `quaver train` read such a file. `quaver doctor --model`
writes one under a budget of decibels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from quaver.conversion.convert import (
    FilterDecision,
    ModuleFilter,
    apply_filter,
    convert_with_layer_configs,
    make_serving_filter,
)
from quaver.experts.module import is_experts
from quaver.recipes.config import Float8LinearConfig, resolve_config
from quaver.recipes.field_checks import check_field
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.recipes.serving import serving_config
from quaver.runtime.errors import InputError

HIGH_PRECISION = "high_precision"
"""The recipe of a layer that is not converted."""


@dataclass(frozen=True)
class LayerRecipes:
    """The recipe of each layer, for `prepare_model_for_float8(model, recipes)`.

    That function takes any nn.Module and needs transformers.

    Args:
        recipe: the recipe of layers that are not in `layers`.
        layers: the recipe, or `HIGH_PRECISION`, by the fully qualified name of a linear or a module of experts.
    Raises:
        ValueError: a recipe is unknown; one in `layers` has delayed or static scales and is not `recipe`, because a
            model has one state for these scales; or `layers` is no such mapping.
    """

    recipe: str = "tensorwise"
    layers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        canonicalize_recipe(self.recipe)  # raises ValueError listing the choices
        is_mapping = isinstance(self.layers, Mapping) and all(
            isinstance(recipe, str) for recipe in self.layers.values()
        )
        check_field(is_mapping, "layers", "a mapping from layer names to names of recipes", self.layers)
        for name, recipe in self.layers.items():
            if recipe == HIGH_PRECISION:
                continue
            try:
                config = resolve_config(recipe)
            except ValueError as error:
                raise InputError(f"layer {name}: {error}; or {HIGH_PRECISION}") from error
            if config.has_persistent_scales and recipe != self.recipe:
                raise InputError(f"layer {name}: expected a recipe with dynamic scaling, got {recipe!r}")

    @classmethod
    def parse(cls, recipe: str, entries: Sequence[str]) -> LayerRecipes:
        """Make an instance from entries "name=recipe".

        Raises:
            ValueError: an entry has another form, a layer has two entries, or a recipe is refused (`LayerRecipes`).
        """
        layers: dict[str, str] = {}
        for entry in entries:
            name, equals, layer_recipe = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not (name and equals and layer_recipe):
                raise InputError(f"expected an entry 'layer=recipe', got {entry!r}")
            if name in layers:
                raise InputError(f"layer {name} has two recipes, {layers[name]!r} and {layer_recipe!r}")
            layers[name] = layer_recipe
        return cls(recipe, layers)

    @classmethod
    def read(cls, path: str | Path) -> LayerRecipes:
        """Read the [float8] section of a TOML file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not TOML or has no section [float8]; `layer_recipes` is no list of strings; or
                `parse` refuses an entry.
        """
        try:
            section = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("float8")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{str(path)!r} is not valid TOML: {error}") from error
        if not isinstance(section, dict):
            raise InputError(f"expected a section [float8] with recipe_name and layer_recipes in {str(path)!r}")
        entries = section.get("layer_recipes", [])
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise InputError(f"layer_recipes in {str(path)!r}: expected a list of 'layer=recipe', got {entries!r}")
        return cls.parse(section.get("recipe_name", cls.recipe), entries)

    @property
    def entries(self) -> tuple[str, ...]:
        """The `name=recipe` strings that `parse` reads."""
        return tuple(f"{name}={recipe}" for name, recipe in self.layers.items())

    def get_recipe(self, name: str) -> str:
        """Return the recipe of a layer."""
        return self.layers.get(name, self.recipe)


def check_layer_names(module: nn.Module, recipes: LayerRecipes) -> None:
    """Raise InputError unless all `layers` of `recipes` are linears or experts of `module`."""
    modules = dict(module.named_modules())
    for name in recipes.layers:
        if not isinstance(modules.get(name), nn.Linear) and not (name in modules and is_experts(modules[name])):
            raise InputError(f"layer_recipes: {name!r} is not a linear, or experts, of this {type(module).__name__}")


def convert_layers(
    module: nn.Module,
    recipes: LayerRecipes,
    *,
    get_config: Callable[[str], Float8LinearConfig] = resolve_config,
    serving: str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Run `convert_to_float8_training` with the recipe of each layer. An error leaves `module` unchanged.

    Args:
        module, serving, include_subclasses: as for `convert_to_float8_training`.
        recipes: the recipe of each layer. All of its `layers` must be linears or experts of `module`.
        get_config: returns the config for the name of a recipe.
        module_filter_fn: false leaves a layer in high precision, regardless of its recipe.
    Returns:
        `module`.
    Raises:
        ValueError: `module` lacks a layer of `recipes`; or as `convert_to_float8_training`.
        TypeError, RuntimeError: as `convert_to_float8_training`.
    """
    check_layer_names(module, recipes)
    used = dict.fromkeys([recipes.recipe, *recipes.layers.values()])
    configs = {recipe: get_config(recipe) for recipe in used if recipe != HIGH_PRECISION}
    if serving is not None:
        configs = {recipe: serving_config(serving, config) for recipe, config in configs.items()}
    decide_unlisted = module_filter_fn if serving is None else make_serving_filter(module, serving, module_filter_fn)

    def decide(layer: nn.Module, name: str) -> FilterDecision:
        if recipes.get_recipe(name) == HIGH_PRECISION:
            return FilterDecision(convert=False, reason="layer_recipes: high precision")
        return apply_filter(module_filter_fn if name in recipes.layers else decide_unlisted, layer, name)

    return convert_with_layer_configs(
        module,
        get_config=lambda name: configs[recipes.get_recipe(name)],
        serving=serving,
        module_filter_fn=decide,
        include_subclasses=include_subclasses,
    )
