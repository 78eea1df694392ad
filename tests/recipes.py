"""Names the float8 formats, and sets of recipes for the parameters of tests."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NON_BLOCK_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight")
"""Recipes with dynamic scales per tensor or row: the operands alone determine their results."""
BLOCK_RECIPES = ("blockwise", "blockwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")
"""Recipes with dynamic scales of blocks. Under tensor parallelism each rank needs features in whole blocks."""
DYNAMIC_RECIPES = (*NON_BLOCK_RECIPES, *BLOCK_RECIPES)
PERSISTENT_RECIPES = ("delayed", "delayed_with_dynamic_weight")
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
