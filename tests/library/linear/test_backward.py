"""Tests `Float8LinearConfig.backward`: gradients of what the forward multiplied, or of what it quantized."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    cast_weights_once,
    convert_to_float8_training,
    freeze_to_float8,
    use_float8_primary_weights,
)
from quaver.linear.quantize import Quantizer
from quaver.numerics.monitoring import Monitor
from quaver.recipes.scaling import dequantize
from quaver.recipes.serving import serving_config
from tests.counting import count_saved_bytes
from tests.recipes import NON_BLOCK_RECIPES
from tests.reference import lowest_sqnr_db
from tests.steps import assert_same, compute_results
from tests.thinned import thinned

M, K, N = (2, 20), 144, 200
MODES = ("dequantized", "high_precision")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_config(recipe, backward, **options):
    return replace(Float8LinearConfig.from_recipe_name(f"{recipe}:{backward}"), **options)


def make_step(config, dtype=torch.bfloat16):
    """Return a converted linear in a Sequential, its input and the gradient of its output."""
    linear = nn.Linear(K, N, dtype=dtype)
    input = torch.randn(*M, K, dtype=dtype).mul_(torch.logspace(-3, 0, M[1])[:, None]).to(dtype).requires_grad_()
    return convert_to_float8_training(nn.Sequential(linear), config=config), input, torch.randn(*M, N, dtype=dtype)


def compute_expected_gradients(model, input, grad_output):
    """Return the gradients of input and weight of plain PyTorch, on dequantized operands or those in high precision."""
    linear, dtype = model[0], input.dtype
    operands = []
    for hp, casts in ((input, linear.config.casts.input), (linear.weight, linear.config.casts.weight)):
        operand = Quantizer(casts, dtype)(hp.detach(), row=True, column=False).row
        values = dequantize(operand.data, operand.dequant_scale, dtype, operand.layout, operand.outer_scale)
        values = hp.detach().to(dtype) if linear.config.backward == "high_precision" else values.view(hp.shape)
        operands.append(values.requires_grad_())
    operands.append(linear.bias.detach().to(dtype).requires_grad_())
    F.linear(*operands).backward(grad_output)
    return [operand.grad for operand in operands[:2]]


def compute_gradients(model, input, grad_output, call=None):
    return compute_results(model, input, grad_output=grad_output, call=call)[1:3]


@pytest.mark.parametrize(
    ("recipe", "dtype", "backward"),
    thinned((*NON_BLOCK_RECIPES, "blockwise", "mxfp8"), DTYPES, MODES),
)
def test_gradients_are_those_of_plain_pytorch(recipe, dtype, backward):
    model, input, grad_output = make_step(make_config(recipe, backward), dtype)
    expected = compute_expected_gradients(model, input, grad_output)
    assert_same(compute_gradients(model, input, grad_output), expected)
    saves_weight_codes = copy.deepcopy(model)
    saves_weight_codes[0].config = replace(model[0].config, keep_float8_weight_for_backward=True)
    assert_same(compute_gradients(saves_weight_codes, input, grad_output), expected)
    with cast_weights_once(model):
        assert_same(compute_gradients(model, input, grad_output), expected)
    recomputed = functools.partial(checkpoint, model, use_reentrant=False)
    assert_same(compute_gradients(model, input, grad_output, recomputed), expected)
    float8_backward = Float8Linear(K, N, dtype=dtype, config=recipe)
    float8_backward.load_state_dict(model[0].state_dict())
    assert_same(model(input), float8_backward(input))


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])  # whose own scales are powers of two
@pytest.mark.parametrize("serving", ["vllm-per-token", "vllm-per-tensor", "deepgemm", "deepgemm-ue8m0"])
def test_gradients_match_the_operands_that_a_server_multiplies(serving, recipe):
    model, input, grad_output = make_step(serving_config(serving, make_config(recipe, "dequantized")))
    assert_same(compute_gradients(model, input, grad_output), compute_expected_gradients(model, input, grad_output))


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_delayed_scaling_has_dynamic_gradients_under_autocast_at_first(backward):
    delayed, input, grad_output = make_step(make_config("delayed", backward), torch.float32)
    dynamic, _, _ = make_step(make_config("tensorwise", backward), torch.float32)
    dynamic.load_state_dict(delayed.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(compute_gradients(dynamic, input, grad_output), compute_gradients(delayed, input, grad_output))


def test_autocast_casts_an_output_in_high_precision():
    model, input, _ = make_step(Float8LinearConfig(high_precision_matmuls=("output",)), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model(input), F.linear(input, model[0].weight, model[0].bias))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_weight_gives_its_dequantized_values(recipe):
    grads = []
    for backward in ("dequantized", "high_precision"):
        torch.manual_seed(0)
        linear, grad_output = nn.Linear(K, N, dtype=torch.bfloat16), torch.randn(*M, N, dtype=torch.bfloat16)
        frozen = freeze_to_float8(nn.Sequential(linear.requires_grad_(False)), config=make_config(recipe, backward))
        input = torch.randn(*M, K, dtype=torch.bfloat16, requires_grad=True)
        assert sum(count_saved_bytes(functools.partial(frozen, input)).values()) <= N * K + 4 * N
        frozen(input).backward(grad_output)
        grads.append(input.grad)
        assert_same(grad_output @ frozen[0].weight.to_high_precision(), input.grad)
    assert_same(*grads)


def test_each_backward_saves_codes_or_high_precision():
    elements = M[0] * M[1] * K
    for backward, codes, hp in (("dequantized", elements, 0), ("high_precision", 0, 2 * elements)):
        model, input, _ = make_step(make_config("rowwise", backward))
        saved = count_saved_bytes(functools.partial(model, input))
        assert saved.pop(torch.float8_e4m3fn, 0) == codes
        assert saved.pop(torch.bfloat16) == hp + 2 * K * N
        assert saved.pop(torch.float32, 0) == (4 * M[0] * M[1] if codes else 0)
        assert not saved


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_primary_weights_and_a_monitor_keep_the_gradients(backward):
    model, input, grad_output = make_step(make_config("rowwise", backward))
    expected = compute_gradients(model, input, grad_output)
    with Monitor(model, every=1) as watched:
        assert_same(compute_gradients(model, input, grad_output), expected)
        watched.step()
    casts = [(tensor["operand"], tensor["cast"]) for tensor in watched.header["tensors"]]
    cast = "both" if backward == "dequantized" else "row"
    assert casts[:2] == [("input", cast), ("weight", cast)]
    assert min(watched.samples[0]["sqnr_db"]) > lowest_sqnr_db(3, 3, 7)  # the output: two casts, then bfloat16
    if backward == "high_precision":
        with pytest.raises(ValueError, match="one of its matmuls runs in high precision"):
            use_float8_primary_weights(model, torch.optim.SGD(model.parameters()))
        return
    use_float8_primary_weights(model, torch.optim.SGD(model.parameters()), master_dtype=torch.bfloat16)
    assert model[0].weight.column_data_fp8 is model[0].weight.data_fp8
    assert_same(compute_gradients(model, input, grad_output), expected)


@pytest.mark.parametrize(
    ("recipe", "backward"), thinned(("tensorwise", "rowwise"), ("dequantized", "high_precision"), together=1)
)
def test_compiled_gradients_are_those_of_eager_code(recipe, backward):
    model, input, grad_output = make_step(make_config(recipe, backward))
    compiled = torch.compile(model, fullgraph=True)
    assert_same(compute_gradients(model, input, grad_output, compiled), compute_gradients(model, input, grad_output))


def compute_penalty(model, input):
    """A gradient penalty, as a discriminator has: a function of the gradient of the input."""
    (grad,) = torch.autograd.grad(model(input).square().sum(), input, create_graph=True)
    return (grad.norm() - 1).square()


@pytest.mark.parametrize("wanted", ["0.weight", "2.weight", "4.weight"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_derivative_is_refused_for_any_parameter_alone(wanted, in_place):
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)]
    model = convert_to_float8_training(nn.Sequential(*layers), module_filter_fn=lambda module, name: name == "2")
    loss = compute_penalty(model, torch.randn(8, 32, requires_grad=True))
    inputs = [model.get_parameter(wanted)]
    with pytest.raises(RuntimeError, match="no second derivative"):
        if in_place:
            loss.backward(inputs=inputs)
        else:
            torch.autograd.grad(loss, inputs, allow_unused=True)


@pytest.mark.parametrize("wanted", ["weight", "input"])
def test_a_second_derivative_with_a_constant_grad_output_is_refused(wanted):
    linear, input = Float8Linear(32, 16), torch.randn(8, 32, requires_grad=True)
    by_name = {"weight": linear.weight, "input": input}
    first = by_name["input" if wanted == "weight" else "weight"]
    (grad,) = torch.autograd.grad(linear(input).sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.square().sum(), by_name[wanted], allow_unused=True)


def test_bad_names_and_values_are_refused():
    with pytest.raises(ValueError, match="'rowwise:bf16': expected one of float8, dequantized, high_precision"):
        Float8LinearConfig.from_recipe_name("rowwise:bf16")
    with pytest.raises(ValueError, match="backward: expected one of float8, dequantized, high_precision, got 'hp'"):
        Float8LinearConfig(backward="hp")
    with pytest.raises(ValueError, match='enable_fsdp_float8_all_gather: .* or use backward="dequantized"'):
        make_config("tensorwise", "high_precision", enable_fsdp_float8_all_gather=True)
    config = make_config("rowwise", "high_precision")
    assert replace(config, backward="float8") == Float8LinearConfig.from_recipe_name("rowwise")
    assert Float8Linear(8, 8, config="tensorwise:dequantized").config.backward == "dequantized"
