"""Tests that with `serving=` the forward multiplies an engine's codes, and the backward keeps the recipe's."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quaver import (
    CastConfig,
    Float8LinearConfig,
    LayerRecipes,
    ScalingType,
    calibrate_float8_static_scales,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    freeze_to_float8,
    serving_config,
    use_float8_primary_weights,
)
from quaver.conversion.layer_recipes import convert_layers
from quaver.linear import function
from quaver.recipes.reference import ReferenceLinear
from quaver.recipes.serving import SERVING_CASTS, find_serving_name
from tests.reference import assert_same_bits
from tests.steps import assert_same, compute_results


@pytest.mark.parametrize("serving", [name for name in SERVING_CASTS if name != "vllm-static"])
def test_a_linear_is_the_reference(serving):
    torch.manual_seed(0)
    linear, input = nn.Linear(256, 128), torch.randn(3, 40, 256)
    input[0, 3] = 0
    float8 = convert_to_float8_training(copy.deepcopy(linear), serving=serving)
    reference = ReferenceLinear(256, 128, config=float8.config)
    reference.load_state_dict(linear.state_dict())
    assert find_serving_name(float8.config) == serving
    results = []
    for module in (float8, reference):
        x = input.clone().requires_grad_()
        module(x).square().mean().backward()
        results.append((module(x), x.grad, module.weight.grad, module.bias.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("serving", "base"), [("vllm-per-token", "rowwise_with_gw_hp"), ("deepgemm", "blockwise")])
def test_the_backward_multiplies_what_the_recipe_multiplies(serving, base, monkeypatch):
    """A weight in blocks is the exception: one set of codes serves both directions."""
    torch.manual_seed(0)
    linear, input = nn.Linear(256, 128), torch.randn(64, 256)
    multiplied, multiply = [], function.multiply_operands
    monkeypatch.setattr(
        function, "multiply_operands", lambda a, b, *rest: multiplied.append((a, b)) or multiply(a, b, *rest)
    )
    for options in ({"config": base}, {"config": base, "serving": serving}):
        x = input.clone().requires_grad_()
        output = convert_to_float8_training(copy.deepcopy(linear), **options)(x)
        output.backward(torch.ones_like(output) * 0.3)
    output, grad_weight, grad_input = (
        [torch.equal(a.data.float(), b.data.float()) for a, b in zip(alone, served, strict=True)]
        for alone, served in zip(multiplied[:3], multiplied[3:], strict=True)
    )
    assert (output, grad_weight, grad_input) == ([False] * 2, [True] * 2, [True, base != "blockwise"])


@pytest.mark.parametrize("serving", ["vllm-per-token-kernel", "compressed-tensors", "deepgemm"])
def test_weights_quantized_before_the_forward_have_the_codes_of_an_engine(serving):
    """cast_weights_once, primary weights and frozen weights quantize so."""
    torch.manual_seed(0)
    linear, input = nn.Linear(256, 128), torch.randn(64, 256)
    expected = convert_to_float8_training(copy.deepcopy(linear), serving=serving)(input)
    scoped, primary = (convert_to_float8_training(copy.deepcopy(linear), serving=serving) for _ in range(2))
    with cast_weights_once(scoped):
        assert_same_bits(scoped(input), expected)
    use_float8_primary_weights(primary, torch.optim.AdamW(primary.parameters()))
    assert_same_bits(primary(input), expected)
    frozen = freeze_to_float8(copy.deepcopy(linear).requires_grad_(False), config=serving_config(serving))
    assert_same_bits(frozen(input), expected)


def calibrate_input_scales(**options):
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.ModuleList(nn.Linear(64, 64) for _ in range(32)), **options)
    input = torch.randn(16, 64)
    with calibrate_float8_static_scales(model):
        for index, linear in enumerate(model):
            linear(input * (1 + index / 7))
    scales = [linear.get_persistent_scales(torch.device("cpu")) for linear in model]
    return torch.stack([scale.input.quant_scale for scale in scales])


def test_a_static_scale_is_the_one_that_an_engine_reads_from_the_folder():
    """Engines multiply by RN(1 / RN(1 / quant_scale)), which is another number for 17% of the mantissas."""
    own = calibrate_input_scales(config=Float8LinearConfig(cast_config_input=CastConfig(ScalingType.STATIC)))
    served = calibrate_input_scales(serving="vllm-static")
    assert (own != served).sum() > 1
    assert_same_bits(1 / (1 / own), served)
    assert_same_bits(1 / (1 / served), served)
    given = CastConfig(ScalingType.STATIC, static_quant_scale=1.1, scale_rule="vllm")
    with pytest.raises(ValueError, match="scaling_type: expected dynamic with the scale_rule vllm-kernel"):
        replace(given, scale_rule="vllm-kernel")


def test_a_serving_config_changes_the_casts_of_the_forward_only():
    config = serving_config("vllm-block", replace(Float8LinearConfig.from_recipe_name("blockwise"), emulate=True))
    assert config.emulate
    assert config.casts.weight.has_equal_casts
    assert config.casts.input.column == Float8LinearConfig.from_recipe_name("blockwise").casts.input.column
    assert not config.matmuls.output.scales_are_powers_of_2
    assert not config.matmuls.grad_input.scales_are_powers_of_2
    assert config.matmuls.grad_weight.scales_are_powers_of_2
    assert serving_config("vllm-block-ue8m0").matmuls.output.scales_are_powers_of_2
    assert serving_config("vllm-per-tensor", "tensorwise").casts.input.has_equal_casts
    assert serving_config("vllm-block", "rowwise").casts.input.column.is_rowwise
    assert serving_config("vllm-block", config) == config
    assert find_serving_name(Float8LinearConfig()) is None
    assert "by the rule vllm-group" in str(config)


def test_compiled_code_multiplies_the_same():
    """The rules divide, in rows and in blocks."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    for linear, serving in ((eager[0], "vllm-per-token-kernel"), (eager[2], "vllm-block")):
        convert_to_float8_training(linear, serving=serving)
    compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True)
    input = torch.randn(32, 128)
    assert_same(compute_results(compiled, input, grad_output=1.0), compute_results(eager, input, grad_output=1.0))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


def build_model():
    linears = {"gate": nn.Linear(32, 32), "router": nn.Linear(32, 32), "lm_head": nn.Linear(32, 64)}
    return nn.ModuleDict({"mlp": Mixture(), **linears})


def test_heads_and_routers_stay_in_high_precision():
    skipped = conversion_report(convert_to_float8_training(build_model(), serving="deepgemm")).skipped
    reasons = {layer.name: layer.reason for layer in skipped}
    assert reasons == dict.fromkeys(["mlp.gate", "router", "lm_head"], "high precision in deepgemm")
    with pytest.raises(ValueError, match=r"engines keep mlp\.gate in high precision, but it would be"):
        convert_to_float8_training(build_model(), serving="deepgemm", module_filter_fn=lambda module, name: True)


def test_recipes_by_layer_leave_heads_and_routers_out_too():
    recipes = LayerRecipes("blockwise", {"mlp.experts.0": "blockwise_with_gw_hp"})
    skipped = conversion_report(convert_layers(build_model(), recipes, serving="deepgemm")).skipped
    assert [layer.name for layer in skipped] == ["mlp.gate", "router", "lm_head"]
    assert {layer.reason for layer in skipped} == {"high precision in deepgemm"}
    listed = LayerRecipes("blockwise", {"lm_head": "blockwise_with_gw_hp"})
    for options in ({"recipes": listed}, {"recipes": recipes, "module_filter_fn": lambda module, name: True}):
        with pytest.raises(ValueError, match="serving='deepgemm': engines keep .* in high precision"):
            convert_layers(build_model(), serving="deepgemm", **options)


@pytest.mark.parametrize(
    ("serving", "config", "message"),
    [
        ("vlm", None, r"serving: expected one of vllm-per-token, .*, got 'vlm'$"),
        ("vllm", None, r"got 'vllm'; did you mean 'vllm-per-token'\?"),
        ("sglang-pertoken", None, r"did you mean 'sglang-per-token'\?"),
        ("vllm-per-token", "delayed", "^expected a recipe with dynamic scaling beside serving=.*, got 'delayed'"),
        ("vllm-per-token", "mxfp8", "^expected a recipe without blocks, such as 'rowwise', .*, got 'mxfp8'"),
    ],
)
def test_unknown_engines_and_recipes_that_they_lack_are_refused(serving, config, message):
    linear = nn.Linear(32, 32)
    with pytest.raises(ValueError, match=message):
        convert_to_float8_training(linear, serving=serving, config=config)
    assert type(linear) is nn.Linear


def test_siblings_that_engines_fuse_have_one_scale_there():
    attention = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    with pytest.raises(ValueError, match="engines fuse q_proj, k_proj, v_proj of the model into one linear"):
        convert_to_float8_training(attention, serving="vllm-per-tensor")
    convert_to_float8_training(attention, serving="vllm-per-tensor", module_filter_fn=lambda _, name: name == "o_proj")
