"""Names the float8 formats, and sets of recipes for the parameters of tests; makes their configs."""

from dataclasses import replace

import torch

from quaver import Float8LinearConfig
from quaver.recipes.serving import SERVING_CASTS, serving_config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NON_BLOCK_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight")
"""Recipes with dynamic scales per tensor or row: the operands alone determine their results."""
BLOCK_RECIPES = ("blockwise", "blockwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")
"""Recipes with dynamic scales of blocks. Under tensor parallelism each rank needs features in whole blocks."""
DYNAMIC_RECIPES = (*NON_BLOCK_RECIPES, *BLOCK_RECIPES)
PERSISTENT_RECIPES = ("delayed", "delayed_with_dynamic_weight")
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def make_recipe_config(recipe, **options):
    """Return the config of a recipe or a serving engine, either with a ":backward", or of "tensorwise_power_of_2"."""
    engine, colon, backward = recipe.partition(":")
    if engine in SERVING_CASTS:
        base = f"{SERVING_CASTS[engine].recipe}:{backward}" if colon else None
        return replace(serving_config(engine, base), **options)
    if recipe == "tensorwise_power_of_2":
        return Float8LinearConfig(round_scales_to_power_of_2=True, **options)
    return replace(Float8LinearConfig.from_recipe_name(recipe), **options)
