"""Tests architectures of transformers: conversion, report, one step, gradients, and the conversion back."""

import copy
import math

import pytest
import torch
from torch import nn

from quaver import Float8Linear, conversion_report, convert_to_high_precision
from quaver.experts.module import Float8Experts, get_expert_weights
from quaver.integrations.transformers import prepare_model_for_float8
from tests.library.third_party.zoo import MODELS, compute_loss, make
from tests.reference import sqnr_db
from tests.thinned import at_night

ONE_MATMUL_DB = {"tensorwise": 24.6, "rowwise": 28.4}
"""The worst of a linear's three matmuls with Gaussian operands (docs/numerics.md)."""
NEVER_CONVERTED = {"mixtral": {"MixtralTopKRouter": 2}, "qwen3_moe": {"Qwen3MoeTopKRouter": 2}}
NEVER_CONVERTED |= {"deepseek_v3": {"DeepseekV3TopkRouter": 1}}
"""How many weights belong to modules that are no nn.Linear, all of which the report has to name."""
READ_BY_PARENT = {"mamba": "dt_proj"}
"""The linears whose parent multiplies by their weight without calling them, so that no matmul of theirs is float8."""
KEY_BIASES = ("opt", "bert", "roberta", "vit", "clip")
"""Models whose keys have a bias and no rotary embedding: softmax(q (k + b)) has no b, so its gradient is rounding."""

CASES = [(name, "rowwise") for name in ("llama", "qwen3_moe", "bert", "falcon", "gpt2", "t5", "vit")]
# The gradients of SAM are zero until its first step.
OTHERS = [(name, recipe) for name in MODELS if name != "sam" for recipe in ONE_MATMUL_DB]
CASES += at_night(case for case in OTHERS if case not in CASES)


def compute_gradients(name, recipe=None):
    """Return the model after a backward, converted if a recipe is given, and its gradients in the original's shapes."""
    torch.manual_seed(0)
    model, inputs = make(name)
    if recipe is not None:
        prepare_model_for_float8(model, recipe, include_subclasses=name == "falcon")
    compute_loss(model, inputs).backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    for key, module in model.named_modules():
        if getattr(module, "state_dict_is_transposed", False):
            gradients[f"{key}.weight"] = gradients[f"{key}.weight"].t()
    return model, gradients


def float8_weights(name, module):
    """Return the names of a module's float8 weights as a report has them."""
    if isinstance(module, Float8Experts):
        return [f"{name}.{leaf}" for leaf in get_expert_weights(module)]
    return [name] if isinstance(module, Float8Linear) else []


@pytest.mark.filterwarnings("ignore:nothing to convert")
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_gradients_of_an_architecture_are_near_high_precision(name, recipe):
    """The floor: n linears add the errors of their three matmuls, which are independent, so 3n times the noise.

    It holds for the gradient as a whole. One parameter's gradient may cancel (the biases of CLIP over a pair of images)
    or a token may go to another expert, so one alone must reach 3 dB, which a zero or another's gradient does not.
    """
    model, gradients = compute_gradients(name, recipe)
    _, expected = compute_gradients(name)
    report = conversion_report(model)
    linears = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert [layer.name for layer in report.converted] == [
        weight
        for key, module in model.named_modules()
        for weight in float8_weights(key, module)
        if key.split(".")[-1] != READ_BY_PARENT.get(name)
    ]
    kinds = [layer.reason.partition(", which is not")[0].split()[-1] for layer in report.skipped]
    for kind, count in NEVER_CONVERTED.get(name, {}).items():
        assert kinds.count(kind) == count
    assert not set(linears) - {layer.name for layer in report.layers}
    assert all(layer.reason for layer in report.skipped)
    assert report.converted

    assert gradients.keys() == expected.keys()
    whole = sqnr_db(*(torch.cat([grad.flatten() for grad in grads.values()]) for grads in (expected, gradients)))
    assert whole > ONE_MATMUL_DB[recipe] - 10 * math.log10(3 * len(report.converted))
    checked = [key for key in expected if not (name in KEY_BIASES and key.endswith(("k_proj.bias", "key.bias")))]
    decibels = {key: sqnr_db(expected[key], gradients[key]) for key in checked}
    assert min(decibels.values()) > 3, min(decibels, key=decibels.get)

    plain, inputs = copy.deepcopy(convert_to_high_precision(model)), make(name)[1]
    torch.manual_seed(0)
    original = make(name)[0]
    assert [type(m) for m in plain.modules()] == [type(m) for m in original.modules()]
    assert compute_loss(plain, inputs).item() == compute_loss(original, inputs).item()


def test_a_router_stays_in_high_precision_whatever_its_size():
    """A gate next to experts, or a router; the gate of a gated MLP is converted."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(32, 16)
            self.experts = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(32, 32), "up": nn.Linear(32, 32)})])
            self.router = nn.ModuleDict({"classifier": nn.Linear(32, 16)})

    report = conversion_report(prepare_model_for_float8(Mixture(), "rowwise"))
    assert [layer.name for layer in report.converted] == ["experts.0.gate", "experts.0.up"]
    reasons = {layer.name: layer.reason.partition(":")[0] for layer in report.skipped}
    assert reasons == dict.fromkeys(("gate", "router.classifier"), "router")
