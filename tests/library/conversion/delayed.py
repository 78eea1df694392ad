"""Makes linears and small networks with delayed scaling, steps them, and reads their scales."""

import math
from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    DelayedScalingConfig,
    Float8LinearConfig,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from tests.steps import compute_results

NAN, INF = math.nan, math.inf


def make_delayed_config(recipe="delayed", *, enable=None, **delayed):
    config = Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, delayed_scaling_config=DelayedScalingConfig(**delayed), **(enable or {}))


def make_linear(k=64, n=32, *, recipe="delayed", bias=False, dtype=torch.float32, enable=None, **delayed):
    module = nn.Linear(k, n, bias=bias, dtype=dtype)
    return convert_to_float8_training(module, config=make_delayed_config(recipe, enable=enable, **delayed))


def step(model, input, grad_output=None, *, sync=True, autocast=False):
    """Run forward, backward and sync, and return the output and the gradients."""

    def call(input):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input)

    results = compute_results(model, input, grad_output=1.0 if grad_output is None else grad_output, call=call)
    if sync:
        sync_float8_amax_and_scale_history(model)
    return results


def read_scale(model, name):
    return float8_scaling_state(model).state_dict()[f"{name}.quant_scale"].item()


def find_report(model, name):
    return next(tensor for tensor in float8_scaling_state(model).report() if tensor.name == name)


def copy_scales(model):
    return {name: value.clone() for name, value in float8_scaling_state(model).state_dict().items()}


class Ffn(nn.Module):
    def __init__(self, names=("w1", "w3", "w2")):
        super().__init__()
        self.names = names
        for name, (k, n) in zip(names, ((64, 96), (64, 96), (96, 64)), strict=True):
            setattr(self, name, nn.Linear(k, n, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


class Net(nn.Module):
    """Two FFNs, each recomputed in the backward or not."""

    def __init__(self, how=None):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Ffn() for _ in range(2))
        self.how = how

    def forward(self, x):
        for layer in self.layers:
            h = nn.functional.normalize(x, dim=-1)
            x = x + (checkpoint(layer, h, use_reentrant=self.how == "reentrant") if self.how else layer(h))
        return x


OLD_NAMES = {"input": "x", "weight": "w", "grad_output": "dL_dY"}


def make_old_checkpoint(module, amaxes, *, prefix="", short=False, shape=(1,)):
    """A state dict with the buffers of torchao 0.9: the newest amax first, a scale of 1 for what was never cast."""
    entries = {f"{prefix}{name}": value.clone() for name, value in module.state_dict().items()}
    largest = 448.0  # torchao's default format of every operand; quaver's grad_output is e5m2
    for operand, short_name in OLD_NAMES.items():
        name, seen = short_name if short else operand, amaxes.get(operand)
        history = torch.zeros(4) if seen is None else torch.tensor((seen + [0.0] * 4)[:4])
        entries[f"{prefix}fp8_amax_{name}"] = torch.full(shape, largest if seen is None else seen[0])
        entries[f"{prefix}fp8_amax_history_{name}"] = history
        entries[f"{prefix}fp8_scale_{name}"] = torch.full(shape, 1.0 if seen is None else largest / max(seen))
    return entries
