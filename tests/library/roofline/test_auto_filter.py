"""Tests the filter that skips linears too small to gain."""

import pytest
import torch
from torch import nn

from quaver import auto_filter_for_recipe, conversion_report, convert_to_float8_training


def test_auto_filter_skips_small_layers_and_says_its_estimate():
    sizes = {"tiny": (64, 64), "big": (8192, 8192), "odd": (8192, 8190), "head": (8192, 8192)}
    model = nn.ModuleDict({name: nn.Linear(*size, device="meta") for name, size in sizes.items()})
    module_filter_fn = auto_filter_for_recipe("tensorwise", device="H200", skip=("head",))
    convert_to_float8_training(model, module_filter_fn=module_filter_fn)
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert [name for name, layer in layers.items() if layer.converted] == ["big"]
    for name in ("tiny", "big"):
        assert layers[name].reason.startswith("estimated ")
        assert layers[name].reason.endswith("x on H200 at 8192 tokens")
    assert "not a multiple of 16" in layers["odd"].reason
    assert "contains 'head'" in layers["head"].reason


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("rowise", {}, "unknown recipe 'rowise': expected one of tensorwise"),
        ("rowwise", {"device": "A100"}, "expected one that multiplies float8, got A100"),
        ("rowwise", {"device": "abacus"}, "device: unknown device 'abacus'"),
        ("rowwise", {"device": torch.device("cpu")}, "device: unknown device 'cpu'"),
        ("rowwise", {"skip": "head"}, r"skip: expected a tuple of names, got 'head'; give \('head',\)"),
    ],
)
def test_bad_arguments_are_refused(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        auto_filter_for_recipe(recipe, **options)


def test_blocks_gain_where_a_device_multiplies_their_scales():
    with torch.device("meta"):
        linear = nn.Linear(8192, 8192)
    for recipe, device, other in (("blockwise", "H200", "B200"), ("mxfp8", "B200", "H200")):
        assert auto_filter_for_recipe(recipe, device=device)(linear, "")
        with pytest.raises(
            ValueError, match=f"expected one whose scales {other} multiplies, got {recipe}, with which no layer gains"
        ):
            auto_filter_for_recipe(recipe, device=other)
