"""Tests names of parameters and modules, without what wrappers add to them."""

import torch
from torch import nn

from quaver.runtime.module_names import (
    find_parameter_names,
    find_weight_modules,
    iter_enclosing_modules,
    join_names,
    strip_wrappers,
)


def test_names_lose_the_parts_that_wrappers_add():
    assert strip_wrappers("_orig_mod.a._checkpoint_wrapped_module.b._fsdp_wrapped_module.c") == "a.b.c"
    assert strip_wrappers("_forward_module._original_module.a") == "a"
    assert strip_wrappers("my_orig_mod.a") == "my_orig_mod.a"
    assert [strip_wrappers(name) for name in ("a._orig_mod", "a._orig_mod.", "_orig_mod", "")] == ["a", "a.", "", ""]


def test_containers_are_no_enclosing_modules():
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]))
    modules = dict(model.named_modules())
    assert list(iter_enclosing_modules("0.0.0", modules)) == ["0.0", ""]
    assert list(iter_enclosing_modules("0", modules)) == [""]
    assert list(iter_enclosing_modules("", modules)) == []


def test_tied_parameters_and_shared_modules_have_every_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.ParameterList([torch.ones(1)])})
    model["b"].weight = model["a"].weight
    model["again"] = model["a"]
    weight, bias = model["a"].weight, model["a"].bias
    owners = find_parameter_names(model)
    assert owners[id(weight)] == ["a.weight", "b.weight", "again.weight"]
    assert owners[id(bias)] == ["a.bias", "again.bias"]
    assert find_weight_modules(model) == {id(weight): ["a", "b", "again"]}
    assert find_weight_modules(model["a"]) == {id(weight): [""]}


def test_a_joined_list_has_three_names():
    assert join_names(["a", "", "c"]) == "a, the module, c"
    assert join_names(["a", "b", "c", "d", "e"], "; ") == "a; b; c and 2 more"
