"""Tests primary, frozen and gathered weights under torch.inference_mode, and in a torch.export."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from quaver import Float8LinearConfig, convert_to_float8_training, convert_to_high_precision, freeze_to_float8
from quaver.linear.weight_form import WeightForm
from tests.library.weights.models import build_bfloat16_pair, build_experts, build_linears, build_pair
from tests.mixture import DIM
from tests.steps import assert_same, compute_results, draw
from tests.thinned import at_night

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
KINDS = {
    "primary": lambda make: build_pair(make=make)[0],
    "bfloat16 masters": lambda make: build_bfloat16_pair(make=make)[0],
    "frozen": lambda make: freeze_to_float8(convert_to_high_precision(make()), config="tensorwise"),
    "gathered": lambda make: convert_to_float8_training(convert_to_high_precision(make()), config=GATHERED),
}


def load(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def average(model):
    averages = AveragedModel(model)
    for _ in range(2):
        averages.update_parameters(model)
    return averages.module


def write(model):
    for value in model.state_dict().values():
        value.view(-1)[0].item()
        value.mul_(2)
    for parameter in model.parameters():
        parameter.copy_(parameter * 2)
    return model


WAYS = {
    "load": load,
    "deepcopy": copy.deepcopy,
    "to": lambda model: model.to(torch.float32),
    "average": average,
    "write": write,
    "write copy": lambda model: write(copy.deepcopy(model)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [build_linears, build_experts])
def test_inference_mode_gives_the_results_of_no_grad(kind, make, way):
    results, input = [], draw(8, DIM)
    for mode in (torch.no_grad, torch.inference_mode):
        model = KINDS[kind](make)
        forms = [type(parameter) for parameter in model.parameters()]
        with mode():
            changed = WAYS[way](model)
            results.append([value.clone() for value in changed.state_dict().values()] + [changed(input)])
        with torch.no_grad():
            results[-1].append(changed(input))
        assert any(issubclass(form, WeightForm) for form in forms)
        assert [type(parameter) for parameter in changed.parameters()] == forms
        compute_results(model, input)
    assert_same(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [build_linears, *at_night([(build_experts,)])])
def test_an_export_without_dynamo_computes_the_same(kind, make):
    model, input = KINDS[kind](make), draw(8, DIM)
    expected = model(input).detach()
    assert_same(torch.export.export(model, (input,), strict=False).module()(input).detach(), expected)
