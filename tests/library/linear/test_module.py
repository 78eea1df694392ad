"""Tests Float8Linear: its numbers, what it saves, what it reads, and every way a module is used."""

import copy
import gc
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

from quaver import convert_to_float8_training, convert_to_high_precision, float8_linear
from quaver.linear import function
from quaver.recipes.config import DelayedScalingConfig
from tests.counting import count_saved_bytes
from tests.library.linear.linears import Qkv, count_reads, make_linear, needs_counts
from tests.recipes import E4M3, E5M2, NON_BLOCK_RECIPES, make_recipe_config
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import assert_same, compute_results
from tests.thinned import thinned

RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)


@RECIPE
def test_a_linear_saves_codes_for_its_backward(recipe):
    m, k, n = 256, 64, 32
    module, plain = make_linear(recipe, k, n), nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    input = torch.randn(m, k).bfloat16().requires_grad_()
    weight_bytes = 2 * k * n
    saved = count_saved_bytes(lambda: module(input))
    assert count_saved_bytes(lambda: plain(input)) == {torch.bfloat16: 2 * m * k + weight_bytes}
    if recipe == "rowwise_with_gw_hp":  # grad_weight in high precision needs the input in high precision
        assert saved.pop(torch.bfloat16) == 2 * m * k + weight_bytes
    else:
        assert saved.pop(torch.bfloat16) == weight_bytes  # the parameter itself
        assert saved.pop(E4M3) == m * k
    assert saved.pop(torch.float32, 0) <= 8 * (k + 2)  # scales
    assert not saved


@RECIPE
@pytest.mark.parametrize("autocast", [False, True])
def test_qkv_save_their_shared_input_once(recipe, autocast):
    """grad_weight in high precision needs the input in autocast's dtype: one copy for three linears."""
    m, k, dtype = 256, 64, torch.float32 if autocast else torch.bfloat16
    qkv = convert_to_float8_training(Qkv(k, 32, dtype), config=make_recipe_config(recipe))
    input = torch.randn(m, k, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        saved = count_saved_bytes(lambda: qkv(input))
    if recipe == "rowwise_with_gw_hp":
        weights = sum(linear.weight.nbytes for linear in qkv.linears)
        assert saved[torch.bfloat16] == 2 * m * k + (0 if autocast else weights)
        assert E4M3 not in saved
    else:
        assert saved[E4M3] == m * k


@RECIPE
def test_nothing_is_saved_for_a_gradient_that_is_not_needed(recipe):
    module = make_linear(recipe)
    input = torch.randn(256, 64).bfloat16()
    module.weight.requires_grad_(False)
    frozen = count_saved_bytes(lambda: module(input.requires_grad_()))
    assert frozen.get(E4M3, 0) == 0
    assert frozen[torch.bfloat16] == module.weight.nbytes
    module.weight.requires_grad_(True)
    first_layer = count_saved_bytes(lambda: module(input.detach()))
    assert first_layer.get(torch.bfloat16, 0) == (input.nbytes if recipe == "rowwise_with_gw_hp" else 0)


def count_matmuls():
    return mock.patch.object(function, "multiply_operands", wraps=function.multiply_operands)


@pytest.mark.parametrize(
    ("recipe", "needs_input_grad", "needs_weight_grad"), thinned(NON_BLOCK_RECIPES, (False, True), (False, True))
)
def test_no_matmul_for_a_gradient_that_is_not_needed(recipe, needs_input_grad, needs_weight_grad):
    module = make_linear(recipe, bias=True)
    module.weight.requires_grad_(needs_weight_grad)
    input = torch.randn(16, 64).bfloat16().requires_grad_(needs_input_grad)
    with count_matmuls() as matmul:
        module(input).sum().backward()
    assert matmul.call_count == 1 + needs_input_grad + needs_weight_grad
    assert (input.grad is not None) == needs_input_grad
    assert (module.weight.grad is not None) == needs_weight_grad
    assert module.bias.grad is not None


@pytest.mark.parametrize(("recipe", "bias", "checkpointed"), thinned(NON_BLOCK_RECIPES, (False, True), (False, True)))
def test_a_backward_in_two_halves_makes_two_matmuls(recipe, bias, checkpointed):
    """As torch.distributed.pipelining does in its zero-bubble schedules, to leaves and to tensors within the graph."""
    module = make_linear(recipe, bias=bias)
    grad_output = torch.randn(16, 32).bfloat16()
    leaf = torch.randn(16, 64).bfloat16().requires_grad_()
    parameters = list(module.parameters())

    def forward(input):
        return checkpoint(module, input, use_reentrant=False) if checkpointed else module(input)

    whole = torch.autograd.grad(forward(leaf), [leaf, *parameters], grad_output)
    for input in (leaf, leaf * 1):
        output = forward(input)
        with count_matmuls() as matmul:
            grad_input = torch.autograd.grad(output, [input], grad_output, retain_graph=True)
            assert matmul.call_count == 1
            grads = torch.autograd.grad(output, parameters, grad_output, retain_graph=True)
            assert matmul.call_count == 2
            torch.autograd.backward(output, grad_output, inputs=[module.weight])
            assert matmul.call_count == 3
        assert_same([*grad_input, *grads, module.weight.grad], [*whole, whole[1]])
        module.zero_grad()
    torch.autograd.backward(forward(leaf), grad_output)
    assert_same([tensor.grad for tensor in (leaf, *parameters)], whole)


M, K, N = 48, 32, 16


# A tensorwise cast reads for the amax and again for the codes. A cast along rows reads once, one along columns twice;
# both axes of the input take two reads together. The backward casts the weight again.
@needs_counts
@pytest.mark.parametrize(
    ("recipe", "options", "input_weight_grad_output", "without_gradients"),
    [
        ("tensorwise", {}, (2, 3, 2), (2, 2, 0)),
        ("tensorwise", {"keep_float8_weight_for_backward": True}, (2, 2, 2), (2, 2, 0)),
        ("rowwise", {}, (2, 3, 3), (1, 1, 0)),
        ("rowwise_with_gw_hp", {}, (1, 2, 1), (1, 1, 0)),
        ("rowwise_with_tensorwise_weight", {}, (2, 3, 3), (1, 2, 0)),
    ],
)
def test_a_step_reads_each_operand_as_often_as_expected(recipe, options, input_weight_grad_output, without_gradients):
    def elements(times):
        return np.dot(times, (M * K, N * K, M * N))

    module = make_linear(recipe, K, N, **options)
    input, grad_output = torch.randn(M, K).bfloat16(), torch.randn(M, N).bfloat16()
    assert count_reads(lambda: compute_results(module, input, grad_output=grad_output)) == elements(
        input_weight_grad_output
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert count_reads(lambda: module(input.clone())) == elements(without_gradients)


def test_shared_operands_are_freed_when_backward_ends():
    def float8_tensors():
        gc.collect()
        return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.dtype in (E4M3, E5M2)]

    others = float8_tensors()  # of earlier tests; held, so that no new tensor gets the id of one
    ids = {id(tensor) for tensor in others}

    def count_new_tensors():
        return sum(id(tensor) not in ids for tensor in float8_tensors())

    module = make_linear("rowwise")
    input = torch.randn(64, 64).bfloat16()
    output = module(input)
    assert count_new_tensors() == 1  # the operand that backward reads
    output.sum().backward()
    del output
    assert count_new_tensors() == 0
    with torch.no_grad():
        module(input)
    assert count_new_tensors() == 0  # in evaluation nothing is shared
    qkv = convert_to_float8_training(Qkv(64, 32, torch.bfloat16), config="rowwise")
    outputs = qkv(input)
    assert count_new_tensors() == 1  # one for three linears, and none that is only remembered
    del outputs
    assert count_new_tensors() == 0


def test_a_weight_changed_before_backward_is_an_error():
    module = make_linear("tensorwise")
    output = module(torch.randn(16, 64).bfloat16().requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("recipe", "shape", "bias"),
    thinned(NON_BLOCK_RECIPES, [(64,), (1, 64), (2, 5, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)], (False, True)),
)
def test_inputs_may_have_any_leading_dims_and_no_tokens(recipe, shape, bias):
    module = make_linear(recipe, bias=bias)
    input = torch.randn(shape).bfloat16().requires_grad_()
    output = module(input)
    assert output.shape == (*shape[:-1], 32)
    output.sum().backward()
    assert input.grad.shape == shape
    assert module.weight.grad.shape == (32, 64)
    if 0 in shape:
        assert not module.weight.grad.any()
    rows = input.detach().reshape(-1, 64)
    assert module(rows).reshape(output.shape).equal(output)


@RECIPE
def test_inputs_may_be_non_contiguous_or_expanded(recipe):
    module = make_linear(recipe)
    base = torch.randn(64, 96).bfloat16()
    strided = base[:, ::2].t()[:, :64]
    for input in (base.t(), strided, base[:1, :64].expand(20, 64), torch.randn(4, 64, 3).bfloat16().mT):
        grad_output = torch.randn(*input.shape[:-1], 32).bfloat16()
        contiguous = input.clone(memory_format=torch.contiguous_format)
        expected = compute_results(module, contiguous, grad_output=grad_output)
        assert_same(compute_results(module, input, grad_output=grad_output), expected)
    expanded_grad = torch.ones(1, 32).bfloat16().expand(20, 32)
    compute_results(module, base[:20, :64], grad_output=expanded_grad)


@pytest.mark.parametrize(
    ("recipe", "autocast_dtype", "input_dtype"),
    thinned(NON_BLOCK_RECIPES, (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)),
)
def test_results_under_autocast_have_its_dtype_and_are_near(recipe, autocast_dtype, input_dtype):
    module = make_linear(recipe, dtype=torch.float32, bias=True)
    input, autocast = torch.randn(48, 64).to(input_dtype), torch.autocast("cpu", dtype=autocast_dtype)
    results = compute_results(module, input, call=autocast(module))
    assert [tensor.dtype for tensor in results] == [autocast_dtype, input_dtype, torch.float32, torch.float32]
    plain = convert_to_high_precision(copy.deepcopy(module))
    for result, expected in zip(results, compute_results(plain, input, call=autocast(plain)), strict=True):
        # e4m3 operands of the output, from which grad_output comes; its own e5m2, and an e4m3 operand
        assert sqnr_db(expected, result) > lowest_sqnr_db(3, 3, 2, 3, 7, 7)


def test_state_dict_is_that_of_nn_linear():
    module, plain = make_linear("rowwise", bias=True), nn.Linear(64, 32, dtype=torch.bfloat16)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(type(t) is torch.Tensor for t in module.state_dict().values())
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())
    assert module.state_dict()["weight"].equal(plain.weight)


@RECIPE
def test_functional_call_runs_with_the_given_weight(recipe):
    module = make_linear(recipe, dtype=torch.float32)
    weight = torch.randn(32, 64, requires_grad=True)
    input = torch.randn(16, 64)
    output = torch.func.functional_call(module, {"weight": weight}, (input,))
    assert output.equal(float8_linear(input, weight, config=module.config))
    output.sum().backward()
    assert weight.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize(
    ("input", "message"),
    [
        (lambda: torch.tensor(1.0), r"expected an input of shape \[..., 64\] .* got \[\]"),
        (lambda: torch.randn(3, 63), r"of shape \[..., 64\] for a weight of \[32, 64\], got \[3, 63\]"),
        (lambda: torch.randint(9, (3, 64)), "expected an input of torch.float32, .* got torch.int64"),
        (lambda: torch.randn(3, 64).double(), "expected an input of torch.float32, .* got torch.float64"),
        (lambda: torch.randn(3, 64).to_sparse(), "expected a strided input, got torch.sparse_coo"),
    ],
    ids=["0-d", "features", "integer", "float64", "sparse"],
)
def test_bad_inputs_say_what_was_expected(input, message):
    with pytest.raises(ValueError, match=message):
        make_linear("tensorwise", dtype=torch.float32)(input())


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize("is_training", [True, False])
def test_forward_mode_autodiff_is_refused(name, is_training):
    tensors = {"input": torch.randn(3, 64), "weight": torch.randn(32, 64), "bias": torch.randn(32)}
    expected = float8_linear(**tensors)
    with torch.set_grad_enabled(is_training), forward_ad.dual_level():
        assert float8_linear(**tensors).equal(expected)
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        with pytest.raises(RuntimeError, match="forward-mode autodiff.*; use torch.autograd.grad, or call convert"):
            float8_linear(**tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_a_bias_of_another_dtype_is_refused(dtype):
    """A conversion to float32 would drop the imaginary part."""
    with pytest.raises(ValueError, match=f"expected a bias of torch.float32, .* got {dtype}"):
        float8_linear(torch.randn(3, 64), torch.randn(32, 64), torch.ones(32, dtype=dtype))


@RECIPE
@pytest.mark.parametrize("shape", [(1,), (3, 1), ()], ids=str)
@pytest.mark.parametrize("rows", [3, 0])
def test_a_bias_of_another_shape_is_refused(recipe, shape, rows):
    """The addition would broadcast it, and train it."""
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training), pytest.raises(ValueError, match=r"expected a bias of \[32\], got \["):
            float8_linear(torch.randn(rows, 64), torch.randn(32, 64), torch.ones(shape), config=recipe)


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_a_function_refuses_dtensors(name, one_rank):
    tensors = {"input": torch.randn(3, 64), "weight": torch.randn(32, 64), "bias": torch.randn(32)}
    tensors[name] = DTensor.from_local(tensors[name], init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=rf"{name}: expected no DTensor; use a Float8Linear, or pass {name}.to_local"):
        float8_linear(**tensors)
    if name == "input":
        with pytest.raises(TypeError, match="input is a DTensor, and the linear's weight is not"):
            make_linear("tensorwise")(tensors["input"])


@RECIPE
@pytest.mark.parametrize("absent", ["weight", "bias", "input"])
def test_tensors_without_memory_are_refused(recipe, absent):
    """nn.Linear's matmul raises. Casts run on each tensor's own device, and would multiply uninitialized memory."""
    linear, input = make_linear(recipe, bias=True), torch.randn(3, 64)
    if absent == "input":
        input = input.to("meta")
    else:
        setattr(linear, absent, nn.Parameter(getattr(linear, absent).to("meta")))
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training), pytest.raises(ValueError, match="one device, got .*meta.*to_empty"):
            linear(input)


def test_batched_gradients_are_refused():
    linear, input = make_linear("rowwise"), torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no batched gradients"):
        torch.autograd.grad(linear(input), input, torch.randn(2, 3, 32), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="no batched gradients"):
        torch.autograd.functional.jacobian(linear, input, vectorize=True)
    assert torch.autograd.functional.jacobian(linear, input).shape == (3, 32, 3, 64)


@pytest.mark.parametrize("name", ["config", "float8_config"])
def test_a_config_may_be_set_by_the_name_of_its_recipe(name):
    linear = make_linear("tensorwise")
    setattr(linear, name, "rowwise")
    assert linear.config is linear.float8_config
    assert linear.config == make_recipe_config("rowwise")
    with pytest.raises(TypeError, match="config: expected .* got None"):
        setattr(linear, name, None)
    with pytest.raises(ValueError, match="config: expected one without delayed or static scaling"):
        setattr(linear, name, "delayed")
    assert linear.config == make_recipe_config("rowwise")


def test_a_config_is_refused_if_the_linear_has_other_persistent_scales():
    """Its weight would be scaled dynamically, and its scales would follow the amaxes as before."""
    linear = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config="delayed_with_dynamic_weight")[0]
    own = linear.config
    for config in (
        make_recipe_config("delayed"),
        replace(own, delayed_scaling_config=DelayedScalingConfig(history_len=2)),
    ):
        with pytest.raises(ValueError, match="the scaling that the linear was converted with"):
            linear.config = config
    linear.config = "rowwise"
    linear.config = own


@pytest.mark.parametrize("weight", [(2, 16, 16), (16,), ()], ids=str)
def test_weights_that_are_no_matrices_are_refused(weight):
    with pytest.raises(ValueError, match=rf"expected a weight of shape \[N, K\], got {re.escape(str(list(weight)))}"):
        float8_linear(torch.randn(3, 16), torch.randn(weight))


def make_nested(layout):
    return torch.nested.nested_tensor([torch.randn(n, 64) for n in (3, 16, 5)], layout=layout, requires_grad=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "blockwise", "delayed"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs_give_what_their_rows_give(recipe, layout):
    linear, input = convert_to_float8_training(nn.Linear(64, 48), config=recipe), make_nested(layout)
    rows = torch.cat([part.detach() for part in input.unbind()]).requires_grad_()
    expected = linear(rows)
    expected.square().sum().backward()
    weight_grad, linear.weight.grad = linear.weight.grad, None
    output = linear(input)
    assert output.layout is layout
    assert torch.cat(list(output.unbind())).equal(expected)
    torch.cat(list(output.unbind())).square().sum().backward()
    assert torch.cat(list(input.grad.unbind())).equal(rows.grad)
    assert linear.weight.grad.equal(weight_grad)
    assert (output + output).layout is layout


def test_nested_inputs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="of one length along its last dim"):
        float8_linear(make_nested(torch.jagged).transpose(1, 2), torch.randn(8, 64))
    starts, lengths = torch.tensor([0, 0]), torch.tensor([2, 2])
    holes = torch.nested.narrow(torch.randn(2, 4, 64), 1, starts, lengths, torch.jagged)
    with pytest.raises(NotImplementedError, match="holes between its sequences, got lengths; call contiguous"):
        float8_linear(holes, torch.randn(8, 64))
    with pytest.raises(ValueError, match="expected a nested input of one or more sequences, got none"):
        float8_linear(torch.nested.nested_tensor([]), torch.randn(8, 64))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_encoder_with_a_padding_mask_is_evaluated(recipe):
    """It makes its input a nested tensor; padded rows are zeros."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    input, mask = torch.randn(2, 8, 64), torch.zeros(2, 8, dtype=torch.bool)
    mask[1, 5:] = True
    with torch.no_grad():
        expected = encoder(input, src_key_padding_mask=mask)
        output = convert_to_float8_training(encoder, config=recipe)(input, src_key_padding_mask=mask)
    assert output.shape == expected.shape
    assert sqnr_db(expected, output) > lowest_sqnr_db(*[3] * 2 * 4 * 2)  # operands of 4 linears in 2 layers
    assert output[1, 5:].count_nonzero() == 0
