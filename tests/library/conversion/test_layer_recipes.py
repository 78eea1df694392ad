"""Tests which layers are converted to which recipe."""

import pytest
import torch
from torch import nn

from quaver import Float8Linear, LayerRecipes, conversion_report, convert_to_float8_training
from quaver.conversion.layer_recipes import convert_layers


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))


def get_recipes(module: nn.Module) -> dict[str, str]:
    return {
        name: linear.config.recipe_name.value if isinstance(linear, Float8Linear) else "high_precision"
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    }


def test_each_layer_has_its_recipe_and_the_report_says_why_one_has_none():
    recipes = LayerRecipes("tensorwise", {"1": "rowwise", "2": "high_precision"})
    converted = convert_layers(build_model(), recipes, module_filter_fn=lambda _, name: name != "3")
    assert get_recipes(converted) == {"0": "tensorwise", "1": "rowwise", "2": "high_precision", "3": "high_precision"}
    reasons = {layer.name: layer.reason for layer in conversion_report(converted).skipped}
    assert reasons["2"] == "layer_recipes: high precision"
    converted(torch.randn(16, 32)).sum().backward()
    assert all(linear.weight.grad.isfinite().all() for linear in converted)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "recipes.toml"
    path.write_text('[float8]\nrecipe_name = "rowwise"\nlayer_recipes = ["0=blockwise"]\n')
    assert LayerRecipes.read(path) == LayerRecipes("rowwise", {"0": "blockwise"})


@pytest.mark.parametrize("value", ["[1]", '"0=rowwise"', '{0 = "rowwise"}'])
def test_a_file_with_another_type_is_refused(tmp_path, value):
    path = tmp_path / "recipes.toml"
    path.write_text(f"[float8]\nlayer_recipes = {value}\n")
    with pytest.raises(ValueError, match=r"layer_recipes in '.*recipes.toml': expected a list of 'layer=recipe', got "):
        LayerRecipes.read(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["0"], "expected an entry 'layer=recipe', got '0'"),
        ([3], "expected an entry 'layer=recipe', got 3"),
        (["0=rowwise", "0=mxfp8"], "layer 0 has two recipes"),
        (["0=nonsense"], "layer 0: .*rowwise.*; or high_precision"),
        (["0=delayed"], "layer 0: expected a recipe with dynamic scaling, got 'delayed'"),
    ],
)
def test_bad_entries_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        LayerRecipes.parse("tensorwise", entries)


@pytest.mark.parametrize("layers", [None, ["0=rowwise"], {"0": None}])
def test_layers_of_another_type_are_refused(layers):
    with pytest.raises(ValueError, match="layers: expected a mapping from layer names to names of recipes, got "):
        LayerRecipes("tensorwise", layers)


@pytest.mark.parametrize("name", ["7", "0"])
def test_a_name_that_is_no_layer_is_refused_before_any_is_converted(name):
    plain = nn.Sequential(nn.Sequential(*build_model()), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=f"layer_recipes: '{name}' is not a linear, or experts, of this Sequential"):
        convert_layers(plain, LayerRecipes("tensorwise", {name: "high_precision"}))
    assert set(get_recipes(plain).values()) == {"high_precision"}


def test_an_error_of_one_recipe_leaves_the_layers_of_all_unchanged():
    model = convert_to_float8_training(build_model(), config="mxfp8", module_filter_fn=lambda _, name: name == "2")
    with pytest.raises(ValueError, match="'2' is already converted with mxfp8, asked for blockwise; filter it out"):
        convert_layers(model, LayerRecipes("tensorwise", {"1": "rowwise", "2": "blockwise"}))
    assert [*get_recipes(model).values()] == ["high_precision", "high_precision", "mxfp8", "high_precision"]
