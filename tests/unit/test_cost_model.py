"""The cost model and the auto filter."""

import pytest
import torch
from torch import nn

from quaver import auto_filter_for_recipe, conversion_report, convert_to_float8_training
from quaver.cost_model import linear_cost
from quaver.devices import DEVICE_SPECS, find_device_spec, peak_flops
from tests.reference import RECIPES

H100 = find_device_spec("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("recipe", RECIPES)
def test_larger_layers_gain_more_and_never_more_than_the_hardware(recipe):
    speedups = [linear_cost(16384, size, size, recipe, H100).speedup for size in (256, 1024, 4096, 16384)]
    assert speedups == sorted(speedups)
    assert speedups[0] < 1 < speedups[-1] < 2


BY_PUBLISHED_SPEED = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def test_recipes_rank_as_published():
    speedups = [linear_cost(16384, 4096, 14336, recipe, H100).speedup for recipe in BY_PUBLISHED_SPEED]
    assert speedups == sorted(speedups, reverse=True)


def test_auto_filter_skips_small_layers_and_says_its_estimate():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "tiny": nn.Linear(64, 64),
                "big": nn.Linear(8192, 8192),
                "odd": nn.Linear(8192, 8190),
                "head": nn.Linear(8192, 8192),
            }
        )
    convert_to_float8_training(
        model, module_filter_fn=auto_filter_for_recipe("tensorwise", device="H200", skip=("head",))
    )
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert [name for name, layer in layers.items() if layer.converted] == ["big"]
    for name in ("tiny", "big"):
        assert layers[name].reason.startswith("estimated ")
        assert layers[name].reason.endswith("x on H200 at 8192 tokens")
    assert "not a multiple of 16" in layers["odd"].reason
    assert "contains 'head'" in layers["head"].reason


@pytest.mark.parametrize(
    ("recipe", "device", "message"),
    [
        ("rowise", None, "unknown recipe 'rowise': expected one of tensorwise"),
        ("rowwise", "A100", "A100 does not multiply float8"),
        ("rowwise", "abacus", "no data about device 'abacus'"),
        ("rowwise", torch.device("cpu"), "no data about device 'cpu'"),
    ],
)
def test_bad_arguments(recipe, device, message):
    with pytest.raises(ValueError, match=message):
        auto_filter_for_recipe(recipe, device=device)


def test_device_names():
    assert find_device_spec("NVIDIA H200").name == "H200"
    assert find_device_spec("AMD Instinct MI300X").name == "MI300X"
    assert find_device_spec("Some GPU") is None
    for spec in DEVICE_SPECS:
        assert find_device_spec(spec.name) is spec


def test_peak_of_a_cpu_is_measured_and_says_so():
    peak = peak_flops(torch.device("cpu"))
    assert peak.flops_per_s > 1e8
    assert "unknown device; measured" in peak.source
