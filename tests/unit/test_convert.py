"""The module swap and its report."""

import copy
import json

import pytest
import torch
from torch import nn

from quaver import (
    FilterDecision,
    Float8Linear,
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)])
        self.scaled = Scaled(32, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.scaled(x))


def test_swaps_in_place_and_returns_the_module():
    model = Model()
    assert convert_to_float8_training(model) is model
    assert isinstance(model.blocks[0][0], Float8Linear)
    assert type(model.scaled) is Scaled
    assert not isinstance(model.attention.out_proj, Float8Linear)


def test_a_linear_itself():
    linear = nn.Linear(16, 16)
    assert convert_to_float8_training(linear) is linear
    assert type(linear) is Float8Linear


def test_keeps_everything_about_a_module():
    linear = nn.Linear(16, 32)
    linear.eval()
    linear.my_note = "kept"
    linear.weight.my_mark = 7
    calls = []
    linear.register_forward_hook(lambda *_: calls.append("hook"))
    parameters = dict(linear.named_parameters())
    convert_to_float8_training(nn.ModuleList([linear]))
    linear(torch.randn(2, 16))
    assert calls == ["hook"]
    assert not linear.training
    assert linear.my_note == "kept"
    assert linear.weight.my_mark == 7
    assert all(dict(linear.named_parameters())[name] is p for name, p in parameters.items())


def test_the_way_back_is_exact():
    model = Model()
    before = copy.deepcopy(model)
    tokens = torch.arange(10)
    convert_to_float8_training(model, include_subclasses=True)
    assert not model(tokens).equal(before(tokens))
    convert_to_high_precision(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    for module, old in zip(model.modules(), before.modules(), strict=True):
        assert module.__dict__.keys() == old.__dict__.keys()
    assert model(tokens).equal(before(tokens))
    with pytest.raises(ValueError, match="was not given to convert_to_float8_training"):
        conversion_report(model)


def test_twice_changes_nothing():
    model = convert_to_float8_training(Model())
    classes = [type(m) for m in model.modules()]
    parameters = [id(p) for p in model.parameters()]
    convert_to_float8_training(model)
    assert [type(m) for m in model.modules()] == classes
    assert [id(p) for p in model.parameters()] == parameters
    assert all(
        layer.reason == "already converted" or "tied" in layer.reason for layer in conversion_report(model).converted
    )


def test_twice_with_another_config_is_refused():
    model = convert_to_float8_training(Model())
    with pytest.raises(ValueError, match="already converted, with another config .* convert_to_high_precision first"):
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))


def test_the_report_has_every_linear_and_why():
    model = convert_to_float8_training(
        Model(), module_filter_fn=lambda module, name: "blocks.1" not in name and name != "missing"
    )
    report = conversion_report(model)
    reasons = {layer.name: (layer.converted, layer.reason) for layer in report.layers}
    assert reasons == {
        "blocks.0.0": (True, ""),
        "blocks.0.2": (True, ""),
        "blocks.1.0": (False, "filter"),
        "blocks.1.2": (False, "filter"),
        "scaled": (False, "subclass Scaled of nn.Linear (include_subclasses=True converts it)"),
        "attention.out_proj": (
            False,
            "its parent reads the weight without calling the module (nn.MultiheadAttention)",
        ),
        "head": (True, "weight tied to embed"),
    }
    converted, total = 2 * 32 * 64 + 32 * 48, 4 * 32 * 64 + 2 * 32 * 32 + 32 * 48
    assert report.float8_flops_fraction == pytest.approx(converted / total)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["name"] == "blocks.0.0"
    assert "3 of 7 linears in float8" in str(report)
    for name in reasons:
        assert name in str(report)


def test_a_filter_may_say_why():
    model = convert_to_float8_training(
        Model(), module_filter_fn=lambda module, name: FilterDecision(name == "head", f"because {name}")
    )
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert layers["head"].reason == "because head; weight tied to embed"
    assert layers["blocks.0.0"].reason == "because blocks.0.0"


def test_a_module_in_two_places_is_converted_once_in_both():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    convert_to_float8_training(model)
    assert model["a"] is model["b"][0]
    assert type(model["a"]) is Float8Linear
    assert len(conversion_report(model).layers) == 1


@pytest.mark.parametrize(
    ("model", "filter_fn", "message"),
    [
        (nn.ReLU(), None, "nothing to convert: the module has no nn.Linear"),
        (nn.Sequential(nn.Linear(4, 4)), lambda m, n: False, r"all 1 linears were skipped \(0: filter\)"),
        (nn.Sequential(Scaled(4, 4)), None, "all 1 linears were skipped .*subclass Scaled"),
        (nn.Sequential(nn.Linear(4, 0)), None, "a feature dimension is 0"),
    ],
)
def test_nothing_to_convert_raises_and_changes_nothing(model, filter_fn, message):
    with pytest.raises(ValueError, match=message):
        convert_to_float8_training(model, module_filter_fn=filter_fn)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())


def test_checkpoints_go_both_ways():
    plain, converted = Model(), convert_to_float8_training(Model())
    assert list(plain.state_dict()) == list(converted.state_dict())
    converted.load_state_dict(plain.state_dict())
    plain.load_state_dict(converted.state_dict())
