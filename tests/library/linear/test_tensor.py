"""Tests Float8Tensor, which gives a linear what was cast elsewhere, and its errors for everything else."""

import copy
import functools

import pytest
import torch

from quaver import float8_linear
from quaver.experts.function import quantize_weight
from quaver.kernels.operands import Operand
from quaver.linear.quantize import Quantizer
from quaver.linear.tensor import Float8Tensor
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config
from tests.steps import assert_same, compute_results
from tests.thinned import at_night

RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)


def quantize_both_ways(matrix, casts):
    return Quantizer(casts, matrix.dtype)(matrix, row=True, column=True)


def make_float8_weight(weight, config):
    return Float8Tensor.from_operands(*quantize_both_ways(weight, config.casts.weight), dtype=weight.dtype)


def make_float8_input(input, config):
    """[B, T, K]"""
    rows = input.flatten(0, -2)
    whole = Float8Tensor.from_operands(*quantize_both_ways(rows, config.casts.input), dtype=input.dtype)
    return whole.view(input.shape)


def compute_float8_results(input, weight, config, grad, *, backend=None):
    """Return the output, and the gradients of input and weight."""
    linear = functools.partial(float8_linear, config=config)
    call = torch.compile(linear, fullgraph=True, backend=backend) if backend else linear
    return compute_results(torch.nn.Module(), input, weight, grad_output=grad, call=call)


@RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_takes_a_weight_that_was_cast_before(recipe, dtype):
    config = make_recipe_config(recipe)
    input, weight, grad = (torch.randn(shape).to(dtype) for shape in ((2, 6, 20), (28, 20), (2, 6, 28)))
    expected = compute_float8_results(input, weight, config, grad)
    actual = compute_float8_results(input, make_float8_weight(weight, config), config, grad)
    assert_same(actual, expected)
    assert {tensor.dtype for tensor in actual} == {dtype}


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("tensorwise", None),
        ("rowwise", None),
        ("rowwise_with_tensorwise_weight", None),
        ("rowwise", "aot_eager"),
        *at_night([("tensorwise", "aot_eager"), ("rowwise_with_tensorwise_weight", "aot_eager")]),
        *at_night([("rowwise", "inductor")]),
    ],
)
def test_a_linear_takes_an_input_that_was_cast_before(recipe, backend):
    config = make_recipe_config(recipe)
    input, weight, grad = torch.randn(2, 6, 20), torch.randn(28, 20), torch.randn(2, 6, 28)
    expected = compute_float8_results(input, weight, config, grad)
    actual = compute_float8_results(make_float8_input(input, config), weight, config, grad, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_recipe_that_reads_the_input_in_high_precision_refuses_one_without():
    config = make_recipe_config("rowwise_with_gw_hp")
    whole = make_float8_input(torch.randn(1, 4, 16), make_recipe_config("rowwise"))
    message = "expected a high-precision input, which a matmul of this linear reads; got a Float8Tensor"
    with pytest.raises(RuntimeError, match=message):
        float8_linear(whole, torch.randn(16, 16, requires_grad=True), config=config)


@pytest.mark.parametrize(
    ("stored", "operand", "recipe", "message"),
    [
        ("rowwise", "weight", "tensorwise", "is stored as rowwise torch.float8_e4m3fn, .* as dynamic tensorwise"),
        ("tensorwise", "weight", "rowwise", "is stored as tensorwise"),
        ("tensorwise", "grad_output", "tensorwise", "is stored as tensorwise torch.float8_e5m2"),
        ("rowwise", "weight", "rowwise:dequantized", "is stored as columnwise"),
        ("blockwise", "input", "mxfp8", "is stored as blockwise 1 x 128"),
    ],
)
def test_a_linear_refuses_operands_of_another_recipe(stored, operand, recipe, message):
    casts = getattr(make_recipe_config(stored).casts, operand)
    input, weight = torch.randn(64, 128), torch.randn(256, 128)
    for index, matrix in enumerate((input, weight)):
        operands = [input, weight]
        row, column = quantize_both_ways(matrix, casts)
        operands[index] = Float8Tensor.from_operands(row, column, matrix.dtype)
        with pytest.raises(RuntimeError, match=message):
            float8_linear(*operands, config=make_recipe_config(recipe))


def test_a_weight_without_codes_for_grad_input_is_refused():
    config = make_recipe_config("rowwise")
    weight = Float8Tensor.from_operands(
        quantize_both_ways(torch.randn(32, 16), config.casts.weight)[0], None, torch.float32
    )
    with pytest.raises(RuntimeError, match="the weight's column operand is missing"):
        float8_linear(torch.randn(4, 16, requires_grad=True), weight, config=config)


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise:dequantized"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_experts_are_checked_in_the_orientation_in_which_they_are_stored(recipe, transposed):
    config = make_recipe_config(recipe)
    row, column = quantize_weight(torch.randn(2, 128, 256), config, transposed, row=True, column=True)
    stored = Float8Tensor(*((column, row) if transposed else (row, column)), torch.float32)
    stored.check_casts(config.casts.weight, transposed=transposed)
    with pytest.raises(RuntimeError, match="is stored as"):
        stored.check_casts(config.casts.weight, transposed=not transposed)


def cast_matrix(kind="own"):
    """Return a matrix and its Float8Tensor, whose column operand is its own, the row operand, or none."""
    matrix = torch.randn(12, 8)
    row, column = quantize_both_ways(
        matrix, make_recipe_config("tensorwise" if kind == "shared" else "rowwise").casts.input
    )
    return matrix, Float8Tensor.from_operands(row, None if kind == "none" else column, torch.bfloat16)


@pytest.mark.parametrize("column", ["own", "shared", "none"])
def test_a_float8_tensor_has_its_inputs_shape_and_dtype(column):
    matrix, whole = cast_matrix(column)
    assert whole.shape == matrix.shape
    assert whole.dtype is torch.bfloat16
    assert whole.stride() == matrix.stride()
    assert "for torch.bfloat16" in repr(whole)
    close = whole.to_high_precision()
    assert close.dtype is torch.bfloat16
    assert ((close.float() - matrix).abs() <= matrix.abs() * 2**-3 + 2**-8).all()


@pytest.mark.parametrize("column", ["own", "shared", "none"])
def test_views_copies_and_flattening_keep_every_operand(column):
    _, whole = cast_matrix(column)
    names, meta = whole.__tensor_flatten__()
    assert len(names) == (4 if column == "own" else 2)
    rebuilt = Float8Tensor.__tensor_unflatten__({name: getattr(whole, name) for name in names}, meta, None, None)
    for other in (rebuilt, whole.detach(), whole.clone(), copy.deepcopy(whole), whole.view(3, 4, 8), whole.view(-1, 8)):
        assert (other.get_operands().column is None) == (column == "none")
        for operand, expected in zip(other.get_operands(), whole.get_operands(), strict=True):
            if expected is not None:
                assert torch.equal(operand.data.float(), expected.data.float())
                assert torch.equal(operand.dequant_scale, expected.dequant_scale)
    assert (rebuilt.column_data_fp8 is rebuilt.data_fp8) == (column == "shared")


def test_operations_that_codes_lack_are_refused():
    _, whole = cast_matrix()
    for compute in (lambda: whole + 1, whole.sum, whole.t, whole.float, lambda: whole.mul_(2)):
        with pytest.raises(NotImplementedError, match="not defined on a Float8Tensor.*to_high_precision"):
            compute()
    with pytest.raises(NotImplementedError, match="the same last dim"):
        whole.view(8, 12)
    with pytest.raises(NotImplementedError, match="expected as_strided of a Float8Tensor with its shape"):
        whole.as_strided((2, 2), (1, 1))


def test_operands_that_do_not_fit_are_refused():
    _, whole = cast_matrix()
    codes, scale, *_ = whole.get_operands().row
    with pytest.raises(ValueError, match="float8 data with a scale, got torch.float8_e4m3fn without a scale"):
        Float8Tensor.from_operands(Operand(codes), None, torch.float32)
    for data in (codes.float(), codes.view(torch.int8)):
        with pytest.raises(ValueError, match=f"float8 data with a scale, got {data.dtype}"):
            Float8Tensor.from_operands(Operand(data, scale), None, torch.float32)
    with pytest.raises(ValueError, match="two casts of one tensor"):
        Float8Tensor.from_operands(
            Operand(codes, torch.tensor(1.0)), Operand(codes[:2], torch.tensor(1.0)), torch.float32
        )
    for bad in (torch.ones(3), torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0, device="meta")):
        with pytest.raises(
            ValueError, match=r"dequant_scale: expected torch.float32 of shape \[\] on cpu for tensorwise"
        ):
            Float8Tensor.from_operands(Operand(codes, bad), None, torch.float32)
