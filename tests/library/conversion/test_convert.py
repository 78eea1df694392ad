"""Tests the conversion of modules and the conversion back."""

import copy
import logging
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.utils import prune

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from quaver.conversion import convert
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from quaver.recipes.config import resolve_config
from tests.library.conversion.models import Model, Scaled
from tests.mixture import GroupedExperts, make_mixture

GATHERING = replace(Float8LinearConfig(), enable_fsdp_float8_all_gather=True)


def test_conversion_keeps_everything_about_a_module():
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
    for module, old in zip(model.modules(), before.modules(), strict=True):
        assert (type(module), vars(module).keys()) == (type(old), vars(old).keys())
    assert model(tokens).equal(before(tokens))
    assert not conversion_report(model).converted
    assert conversion_report(model).layers[0].reason == "not converted, or new since the conversion"


def test_a_second_conversion_with_another_config_is_refused():
    model = convert_to_float8_training(Model(), module_filter_fn=lambda _, name: name.startswith("blocks.0"))
    with pytest.raises(ValueError, match="already converted with tensorwise, asked for rowwise; .* convert_to_high"):
        convert_to_float8_training(model, config="rowwise")
    assert type(model.blocks[1][0]) is nn.Linear
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda _, name: name.startswith("blocks.1"))
    assert model.blocks[0][0].config == resolve_config("tensorwise")
    assert model.blocks[1][0].config == resolve_config("rowwise")
    assert len(conversion_report(model).config.splitlines()) == 2


def states(model):
    return [(type(module), dict(vars(module)), dict(module._parameters)) for module in model.modules()]


def test_a_second_conversion_changes_nothing():
    model = convert_to_float8_training(Model())
    before, report = states(model), conversion_report(model)
    convert_to_float8_training(model)
    assert (states(model), conversion_report(model)) == (before, report)


def tie_experts():
    model = make_mixture()
    model[1].experts.down_proj = model[0].experts.down_proj
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Model, {"config": "rowise"}, ValueError, "unknown recipe 'rowise'"),
        (Model, {"config": 16}, TypeError, "config"),
        (Model, {"module_filter_fn": lambda _, name: 1 // (name != "blocks.1.2")}, ZeroDivisionError, "division"),
        (Model, {"config": GATHERING}, ValueError, "head is tied to embed, so it cannot be gathered in float8"),
        (tie_experts, {"config": GATHERING}, ValueError, "weight of 0.experts is tied to 1.experts.down_proj, so it"),
        (Model, {"module_filter_fn": ["0"]}, TypeError, r"a function of a module and its name, got \['0'\]"),
        (
            Model,
            {"module_filter_fn": lambda module, _: module.weight > 0},
            TypeError,
            "a FilterDecision, got a tensor of",
        ),
        (Model, {"include_subclasses": "yes"}, TypeError, "include_subclasses: expected a bool, got 'yes'"),
        (Model, {"module_filter_fn": lambda name: True}, TypeError, "a function of a module and its name, got <"),
        (Model, {"module_filter_fn": lambda module, name: 1 + name}, TypeError, "^unsupported operand"),
    ],
)
def test_an_error_leaves_the_model_as_it_was(make, options, error, message):
    model = make()
    before = states(model)
    with pytest.raises(error, match=message):
        convert_to_float8_training(model, **options)
    assert states(model) == before


def build_linears_with_one_made_by_hand():
    config = replace(resolve_config("delayed"), enable_fsdp_float8_all_gather=True)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Float8Linear(16, 16, config=config)), config


@pytest.mark.parametrize(
    ("at", "make"),
    [
        ("add_persistent_scales", build_linears_with_one_made_by_hand),
        ("make_all_gather_weights", build_linears_with_one_made_by_hand),
        ("make_all_gather_weights", lambda: (make_mixture(), GATHERING)),
    ],
)
def test_a_conversion_that_fails_half_way_is_undone(at, make, monkeypatch):
    (model, config), function = make(), getattr(convert, at)
    before = states(model)

    def fail(*args):
        function(*args)
        raise MemoryError

    monkeypatch.setattr(convert, at, fail)
    with pytest.raises(MemoryError):
        convert_to_float8_training(model, config=config)
    for (cls, old, old_parameters), (now_cls, now, parameters) in zip(before, states(model), strict=True):
        assert (cls, old.keys()) == (now_cls, now.keys())
        assert all(parameters[name] is parameter for name, parameter in old_parameters.items())
    for module in model.modules():
        assert getattr(module, "scale_slots", None) is getattr(module, "all_gather_state", None) is None
        assert not module._state_dict_hooks


def test_from_float_makes_a_new_module_of_the_same_parameters():
    linear = nn.Linear(32, 16).eval()
    float8 = Float8Linear.from_float(linear, config="rowwise")
    assert type(linear) is nn.Linear
    assert (float8.weight is linear.weight) & (float8.bias is linear.bias)
    assert not float8.training
    assert Float8Linear.from_float(nn.Linear(32, 16, bias=False)).bias is None
    input = torch.randn(4, 32)
    assert float8(input).equal(convert_to_float8_training(copy.deepcopy(linear), config="rowwise")(input))
    with pytest.raises(TypeError, match="linear: expected an nn.Linear, got ReLU"):
        Float8Linear.from_float(nn.ReLU())
    with pytest.raises(ValueError, match="expected the forward of nn.Linear, got a Scaled that overrides it"):
        Float8Linear.from_float(type("Scaled", (nn.Linear,), {"forward": lambda self, input: input})(32, 16))


class Module(nn.Module):
    """A base class next to nn.Linear, as torchtitan has."""

    def init_weights(self, std):
        nn.init.normal_(self.weight, std=std)


class TitanLinear(nn.Linear, Module):
    def __init__(self, in_features, out_features, *, note="titan"):
        super().__init__(in_features, out_features, bias=False)
        self.note = note

    def extra_repr(self):
        return f"{super().extra_repr()}, note={self.note}"


@pytest.mark.parametrize("duplicate", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_subclass_with_the_forward_of_a_linear_keeps_the_rest(duplicate):
    model = nn.Sequential(TitanLinear(32, 32), nn.ReLU(), TitanLinear(32, 32, note="last"))
    before = copy.deepcopy(model)
    input = torch.randn(4, 32)
    convert_to_float8_training(model, config="rowwise")
    twin = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False))
    convert_to_float8_training(twin, config="rowwise").load_state_dict(before.state_dict())
    model = duplicate(model)
    assert type(model[0]) is type(model[2])
    assert isinstance(model[0], Float8Linear)
    assert isinstance(model[0], TitanLinear)
    assert "note=last" in repr(model[2])
    assert "cast_configs=i:dyn_axs_e4m3" in repr(model[2])
    assert model(input).equal(twin(input))
    assert len(conversion_report(model).converted) == 2
    model[0].init_weights(1.0)
    convert_to_high_precision(model)
    assert type(model[0]) is TitanLinear
    assert vars(model[0]).keys() == vars(before[0]).keys()


def set_attribute(linear, name, value):
    setattr(linear, name, value)
    return linear


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda linear: set_attribute(linear, "forward", linear.forward), "its forward was replaced on the instance"),
        (nn.utils.parametrizations.weight_norm, "it is parametrized"),
        (nn.utils.parametrizations.orthogonal, "it is parametrized"),
        (nn.utils.weight_norm, "its weight is not a parameter"),
        (nn.utils.spectral_norm, "its weight is not a parameter"),
        (lambda linear: prune.l1_unstructured(linear, "weight", 0.5), "its weight is not a parameter"),
        (lambda linear: Scaled(16, 16), "subclass Scaled of nn.Linear overrides forward"),
        (lambda linear: nn.LazyLinear(16), "a LazyLinear without a shape: run a forward"),
        (
            lambda linear: set_attribute(linear, "config", "mine"),
            "attributes with names that Float8Linear uses: config",
        ),
    ],
)
def test_what_cannot_be_converted_is_skipped_and_named(change, reason, caplog):
    odd = change(nn.Linear(16, 16))
    model = nn.ModuleDict({"odd": odd, "plain": nn.Linear(16, 16)})
    before = dict(vars(odd))
    with caplog.at_level(logging.WARNING):
        convert_to_float8_training(model)
    assert "1 layer stays in high precision (odd): " in caplog.text
    assert reason in caplog.text
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert list(layers) == ["odd", "plain"]
    assert (layers["odd"].converted, layers["plain"].converted) == (False, True)
    assert reason in layers["odd"].reason
    assert vars(odd) == before
    model["odd"](torch.randn(2, 16)).sum().backward()


def test_a_linear_made_by_hand_is_all_gathered_in_float8():
    model = nn.Sequential(Float8Linear(16, 16, config=GATHERING), nn.Linear(16, 16))
    assert "gathered in high precision until" in conversion_report(model).layers[0].reason
    convert_to_float8_training(model, config=GATHERING)
    assert [layer.reason for layer in conversion_report(model).layers] == ["", ""]
    assert all(isinstance(linear.weight, Float8AllGatherWeight) for linear in model)
    weights = [linear.weight for linear in model]
    convert_to_float8_training(model, config=GATHERING)
    assert all(linear.weight is weight for linear, weight in zip(model, weights, strict=True))
    delayed = nn.Sequential(Float8Linear(16, 16, config="delayed"))
    assert "cannot run until" in conversion_report(delayed).layers[0].reason
    assert conversion_report(convert_to_float8_training(delayed, config="delayed")).layers[0].reason == ""


class Adapter(nn.Module):
    """Looks up missing attributes in the model inside, as PEFT's models do."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args):
        return self.base_model(*args)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.parallel.DistributedDataParallel,
        lambda model: torch.compile(model, backend="eager"),
        Adapter,
        lambda model: Adapter(nn.parallel.DistributedDataParallel(model)),
    ],
)
def test_wrapped_models_are_reported_and_converted_back(wrap, one_rank):
    model = Model()
    del model.attention, model.blocks[1]
    plain, tokens = copy.deepcopy(model), torch.arange(10)
    convert_to_float8_training(model)
    wrapped = wrap(model)
    inner, outer = conversion_report(model), conversion_report(wrapped)
    assert (inner.summary(), inner.config) == (outer.summary(), outer.config)
    assert wrapped(tokens).equal(model(tokens))
    assert convert_to_high_precision(wrapped) is wrapped
    assert not any(isinstance(module, Float8Linear) for module in wrapped.modules())
    assert wrapped(tokens).equal(plain(tokens))


def test_sharded_models_are_reported_and_converted_back(one_rank):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    convert_to_float8_training(model, config="rowwise")
    fully_shard(model[1])
    fully_shard(model)
    assert conversion_report(model).summary().startswith("2 of 2")
    convert_to_high_precision(model)
    assert isinstance(model[1], FSDPModule)
    assert type(model[1]).__bases__ == (FSDPModule, nn.Linear)
    input = torch.randn(4, 16)
    assert model(input).equal(plain(input))
    model(input).sum().backward()
    fsdp1 = FullyShardedDataParallel(convert_to_float8_training(plain), device_id=torch.device("cpu"))
    assert conversion_report(fsdp1).summary().startswith("2 of 2")


def test_a_refused_conversion_back_changes_nothing(one_rank):
    gathered = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=GATHERING)
    with pytest.raises(RuntimeError, match="'module.0' cannot be converted back: DistributedDataParallel holds"):
        convert_to_high_precision(nn.parallel.DistributedDataParallel(gathered))
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(RuntimeError, match="'1' cannot be converted back: it is parametrized"):
        convert_to_high_precision(model)
    assert isinstance(model[0], Float8Linear)


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
        (nn.Sequential(nn.Linear(4, 4)), lambda m, n: False, r"the only matmul weight was skipped \(0: filter\)"),
        (nn.Sequential(Scaled(4, 4)), None, "the only matmul weight was skipped .*subclass Scaled"),
        (nn.Sequential(nn.Linear(4, 0)), None, "a feature dimension is 0"),
    ],
)
def test_nothing_to_convert_warns_once_and_changes_nothing(model, filter_fn, message, caplog):
    with pytest.warns(UserWarning, match=message):
        assert convert_to_float8_training(model, module_filter_fn=filter_fn) is model
    assert not caplog.records
    assert not any(isinstance(module, Float8Linear) for module in model.modules())


def test_experts_become_all_gather_weights_and_back():
    model = make_mixture(layers=1)
    expected, input = copy.deepcopy(model.state_dict()), torch.randn(8, 40)
    address = model[0].experts.down_proj.data_ptr()
    plain = convert_to_float8_training(copy.deepcopy(model), config="tensorwise")
    convert_to_float8_training(model, config=GATHERING)
    weight = model[0].experts.down_proj
    assert isinstance(weight, Float8AllGatherWeight)
    assert weight.data_ptr() == address
    assert all(layer.reason == "" for layer in conversion_report(model).converted)
    assert model(input).equal(plain(input))
    for duplicate in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert duplicate[0].experts.down_proj.shard_state.name == "down_proj"
        for name, value in duplicate.state_dict().items():
            assert type(value) is torch.Tensor
            assert value.equal(expected[name])
    model.load_state_dict(expected, assign=True)
    assert isinstance(model[0].experts.gate_up_proj, Float8AllGatherWeight)
    by_hand = copy.deepcopy(plain)
    by_hand[0].experts.float8_config = GATHERING
    reasons = {layer.name: layer.reason for layer in conversion_report(by_hand).converted}
    assert reasons["0.experts.down_proj"].startswith("gathered in high precision until")
    convert_to_high_precision(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not hasattr(model[0].experts, "all_gather_state")
    assert not model[0].experts._state_dict_hooks


@pytest.mark.parametrize("is_alone", [False, True])
def test_grouped_matmuls_of_torchtitan_are_converted_back(is_alone):
    experts, tokens = GroupedExperts(), torch.randn(9, 16)
    before, expected = dict(vars(experts)), experts(tokens)
    to_float8_grouped_mm(experts, Float8LinearConfig.from_recipe_name("rowwise"))
    assert not experts(tokens).equal(expected)
    duplicate = copy.deepcopy(experts)
    convert_to_high_precision(experts if is_alone else nn.Sequential(nn.Linear(16, 16), experts))
    assert type(experts) is GroupedExperts
    assert vars(experts).keys() == before.keys()
    assert experts(tokens).equal(expected)
    assert type(duplicate) is not GroupedExperts
