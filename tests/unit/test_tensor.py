"""Float8Tensor: what was cast elsewhere, given to a linear; and clear errors for everything else."""

import copy
import functools

import pytest
import torch

from quaver import float8_linear
from quaver.quantize import INPUT, WEIGHT, Operand, Quantizer, cast_pair
from quaver.tensor import Float8Tensor
from tests.distributed.models import config_of
from tests.reference import RECIPES

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def both_operands(matrix, config, operand):
    return Quantizer(cast_pair(config, operand, matrix.dtype))(matrix, last=True, first=True)[:2]


def as_float8_weight(weight, config):
    return Float8Tensor.from_operands(*both_operands(weight, config, WEIGHT), weight.dtype)


def as_float8_input(input, config):
    """[B, T, K]"""
    rows = input.flatten(0, -2)
    last, first = both_operands(rows, config, INPUT)
    whole = Float8Tensor.from_operands(last, first, input.dtype)
    return whole.view(input.shape)


def results(input, weight, config, grad, *, compiled=False):
    input, weight = input.detach().requires_grad_(), weight.detach().requires_grad_()
    linear = functools.partial(float8_linear, config=config)
    output = (torch.compile(linear, fullgraph=True) if compiled else linear)(input, weight)
    output.backward(grad)
    return output.detach(), input.grad, weight.grad


@RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_takes_a_weight_that_was_cast_before(recipe, dtype):
    config = config_of(recipe)
    input, weight, grad = (
        torch.randn(2, 6, 20).to(dtype),
        torch.randn(28, 20).to(dtype),
        torch.randn(2, 6, 28).to(dtype),
    )
    expected = results(input, weight, config, grad)
    got = results(input, as_float8_weight(weight, config), config, grad)
    for want, have in zip(expected, got, strict=True):
        assert have.dtype is dtype
        assert torch.equal(want, have)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_tensorwise_weight"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_takes_an_input_that_was_cast_before(recipe, compiled):
    config = config_of(recipe)
    input, weight, grad = torch.randn(2, 6, 20), torch.randn(28, 20), torch.randn(2, 6, 28)
    expected = results(input, weight, config, grad)
    got = results(as_float8_input(input, config), weight, config, grad, compiled=compiled)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)


def test_a_recipe_that_reads_the_input_in_high_precision_refuses_one_without():
    config = config_of("rowwise_with_gw_hp")
    whole = as_float8_input(torch.randn(1, 4, 16), config_of("rowwise"))
    with pytest.raises(RuntimeError, match="reads its input in high precision too, and was given a quantized one"):
        float8_linear(whole, torch.randn(16, 16, requires_grad=True), config=config)


def sample(first="own"):
    matrix = torch.randn(12, 8)
    recipe = {"own": "rowwise", "shared": "tensorwise", "none": "rowwise"}[first]
    config = config_of(recipe)
    last, other = both_operands(matrix, config, INPUT)
    if first == "shared":
        other = last
    return matrix, Float8Tensor.from_operands(last, None if first == "none" else other, torch.bfloat16)


@pytest.mark.parametrize("first", ["own", "shared", "none"])
def test_it_looks_like_the_tensor_that_was_cast(first):
    matrix, whole = sample(first)
    assert whole.shape == matrix.shape
    assert whole.dtype is torch.bfloat16
    assert whole.stride() == matrix.stride()
    assert "for torch.bfloat16" in repr(whole)
    close = whole.to_high_precision()
    assert close.dtype is torch.bfloat16
    assert ((close.float() - matrix).abs() <= matrix.abs() * 2**-3 + 2**-8).all()


@pytest.mark.parametrize("first", ["own", "shared", "none"])
def test_views_copies_and_flattening_keep_every_operand(first):
    _, whole = sample(first)
    names, meta = whole.__tensor_flatten__()
    assert len(names) == (4 if first == "own" else 2)
    again = Float8Tensor.__tensor_unflatten__({n: getattr(whole, n) for n in names}, meta, None, None)
    for other in (again, whole.detach(), whole.clone(), copy.deepcopy(whole), whole.view(3, 4, 8), whole.view(-1, 8)):
        for dim in (1, 0) if first != "none" else (1,):
            assert torch.equal(other.operand(dim).data.float(), whole.operand(dim).data.float())
            assert torch.equal(other.operand(dim).dequant_scale, whole.operand(dim).dequant_scale)
    assert (again.first_data_fp8 is again.data_fp8) == (first == "shared")
    if first == "none":
        with pytest.raises(RuntimeError, match="not quantized for a matmul that contracts its rows"):
            whole.operand(0)


def test_what_codes_cannot_do_says_so():
    _, whole = sample()
    for act in (
        lambda: whole + 1,
        lambda: whole.sum(),
        lambda: whole.t(),
        lambda: whole.float(),
        lambda: whole.mul_(2),
    ):
        with pytest.raises(NotImplementedError, match="not defined on a Float8Tensor.*to_high_precision"):
            act()
    with pytest.raises(NotImplementedError, match="keep the last dim"):
        whole.view(8, 12)
    with pytest.raises(NotImplementedError, match="its own size and strides"):
        whole.as_strided((2, 2), (1, 1))


def test_operands_that_do_not_fit_are_refused():
    _, whole = sample()
    codes, scale = whole.operand(1)
    with pytest.raises(ValueError, match="float8 data with a scale"):
        Float8Tensor.from_operands(Operand(codes, None), None, torch.float32)
    with pytest.raises(ValueError, match="float8 data with a scale, got torch.float32"):
        Float8Tensor.from_operands(Operand(codes.float(), scale), None, torch.float32)
    with pytest.raises(ValueError, match="two casts of one tensor"):
        Float8Tensor.from_operands(Operand(codes, scale), Operand(codes[:2], scale), torch.float32)
