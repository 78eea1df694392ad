"""Tests that conversion, checkpointing and stored activations change the class of one module, in any order."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from quaver import Float8Linear, convert_to_float8_training, convert_to_high_precision, freeze_to_float8
from quaver.activations import apply_activation_checkpointing, stop_storing_activations, store_activations_in_float8
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.linear.class_change import get_class_parts
from quaver.recipes.config import resolve_config
from quaver.weights.frozen_modules import FrozenFloat8Linear
from tests.mixture import Experts, GroupedExperts, Mixture, make_mixture
from tests.ranks import on_ranks
from tests.steps import assert_same, compute_results

CONFIG = resolve_config("rowwise")


class Model(nn.Module):
    """Transformers' experts, a linear after them, and torchtitan's experts."""

    def __init__(self) -> None:
        super().__init__()
        mixture = make_mixture(layers=1)[0]
        self.norm, self.router, self.experts, self.out = mixture.norm, mixture.router, mixture.experts, mixture.out
        self.grouped, self.top_k = GroupedExperts(dim=40, hidden=40), 2

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.grouped(Mixture.forward(self, hidden))


def convert(model: nn.Module) -> None:
    convert_to_float8_training(model, config=CONFIG)
    to_float8_grouped_mm(model.grouped, CONFIG)


def checkpoint(model: nn.Module) -> None:
    apply_activation_checkpointing([model.experts, model.grouped, model.out], also_save=["aten.silu"])


def store(model: nn.Module) -> None:
    store_activations_in_float8(model, modules=["experts", "grouped", "norm"])


def make_changed(order) -> nn.Module:
    model = Model()
    for change in order:
        change(model)
    return model


def run(model: nn.Module):
    return compute_results(model, torch.randn(24, 40, generator=torch.Generator().manual_seed(1)))


def list_classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations([convert, checkpoint, store])),
    ids=lambda order: "-".join(change.__name__ for change in order),
)
def test_class_changes_combine_in_any_order(order):
    model = make_changed(order)
    float8 = make_changed([convert])
    assert torch.equal(run(model)[0], run(float8)[0])  # only float8 changes the forward
    expected = run(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list_classes(copied) == list_classes(model)
        assert_same(run(copied), expected)
    stopped = copy.deepcopy(model)
    stop_storing_activations(stopped)
    without_store = make_changed([change for change in order if change is not store])
    assert list_classes(stopped) == list_classes(without_store)
    assert_same(run(stopped), run(without_store))
    convert_to_high_precision(model)
    plain = make_changed([change for change in order if change is not convert])
    assert list_classes(model) == list_classes(plain)
    assert_same(run(model), run(plain))
    assert vars(model.experts).keys() == vars(plain.experts).keys()


def test_a_converted_linear_has_a_public_class():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert type(model[0]) is Float8Linear
    assert type(freeze_to_float8(model.requires_grad_(False), config="tensorwise")[0]) is FrozenFloat8Linear


def test_a_class_keeps_its_name_and_pickle_finds_it():
    model = nn.Sequential(make_changed([checkpoint, store]).experts)
    assert type(model[0]) is not Experts
    assert type(model[0]).__name__ == "Experts"
    assert get_class_parts(pickle.loads(pickle.dumps(model))[0]) == get_class_parts(model[0])


def test_a_class_of_the_user_lives_no_longer_than_its_modules():
    class Local(nn.Linear):
        pass

    model = convert_to_float8_training(nn.Sequential(Local(32, 32)))
    apply_activation_checkpointing([model[0]])
    assert type(copy.deepcopy(model)[0]) is type(model[0]) is not Local
    local = weakref.ref(Local)
    del model, Local
    for _ in range(3):  # the wrapped class, the float8 class, the user's
        gc.collect()
    assert local() is None


class UserLinear(Float8Linear):
    pass


class ReplacingLinear(Float8Linear):
    original_class = nn.Linear


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_subclass_of_a_float8_class_is_converted_back_if_it_names_the_original(is_frozen):
    linears = [UserLinear(32, 32, config="tensorwise"), ReplacingLinear(32, 32, config="tensorwise")]
    if is_frozen:
        freeze_to_float8(nn.Sequential(*linears).requires_grad_(False), config="tensorwise")
    with pytest.raises(RuntimeError, match="UserLinear derives from Float8Linear .* set UserLinear.original_class"):
        convert_to_high_precision(linears[0])
    assert type(convert_to_high_precision(linears[1])) is nn.Linear
    linears[1](torch.randn(4, 32))


def test_a_class_that_was_changed_elsewhere_cannot_be_converted_back():
    model = make_changed([convert])
    model.experts.__class__ = type("Changed", (type(model.experts),), {})
    with pytest.raises(RuntimeError, match="experts.* cannot be converted back: its class Changed derives from"):
        convert_to_high_precision(model)


@on_ranks(2)
def test_layers_change_below_the_class_of_fsdp2():
    model = make_changed([convert, checkpoint, store])
    modules = [model.experts, model.grouped, model.out, model.norm, model]
    for module in modules:
        fully_shard(module)
    run(model)
    stop_storing_activations(model)
    convert_to_high_precision(model)
    plain = make_changed([checkpoint])
    parts = [get_class_parts(module) for module in plain.modules()]
    assert [get_class_parts(module) for module in model.modules()] == parts
    assert all(isinstance(module, FSDPModule) for module in modules)
    assert torch.equal(run(model)[0], run(plain)[0])
