"""Builds models with ordinary and with float8 primary weights, and their optimizers."""

import torch
from torch import nn

from quaver import convert_to_float8_training, use_float8_primary_weights
from tests.mixture import DIM, make_mixture


def build_linears(recipe="tensorwise", dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 16, bias=False))
    return convert_to_float8_training(model.to(dtype), config=recipe)


def build_experts(recipe="rowwise", is_transposed=False):
    """Return experts, with weights of three dims, and a linear."""
    return convert_to_float8_training(make_mixture(layers=1, is_transposed=is_transposed), config=recipe)


def make_adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def build_pair(
    recipe="tensorwise", make_optimizer=make_adamw, master_dtype=torch.float32, make=build_linears, **options
):
    """Return a model with primary weights, and its optimizer."""
    model, optimizer = build_ordinary(recipe, make_optimizer, make, **options)
    return model, use_float8_primary_weights(model, optimizer, master_dtype=master_dtype)


def build_bfloat16_pair(**options):
    return build_pair(master_dtype=torch.bfloat16, **options)


def build_ordinary(recipe="tensorwise", make_optimizer=make_adamw, make=build_linears, **options):
    model = make(recipe)
    return model, make_optimizer(model.parameters(), **options)
