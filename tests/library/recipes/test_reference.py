"""`Float8Linear` is held to quaver/recipes/reference.py, the page from which people learn float8.

Codes and scales are compared bit for bit on any numbers: a dispatch mode sees the operands of the module's matmuls, and
the reference's are those that it hands to `multiply`.

Results are sums, whose order belongs to the library that multiplies and differs between shapes, devices and backends.
So they are compared twice. On numbers for which every order is exact, they are compared bit for bit, eager and compiled
(`exact_numbers`). On Gaussian numbers with outliers, each element has the bound of any order of float32 summation
around the float64 product of the reference's operands.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingType,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from quaver.conversion.freeze import make_blockwise_config
from quaver.recipes import reference
from quaver.recipes.reference import ReferenceLinear
from tests.reference import assert_matmul_exact
from tests.steps import assert_same, compute_results
from tests.thinned import at_night, first

RECIPE_CONFIGS = {recipe.value: Float8LinearConfig.from_recipe_name(recipe) for recipe in Float8LinearRecipeName}
CONFIGS = RECIPE_CONFIGS | {
    "static": Float8LinearConfig(
        cast_config_input=CastConfig(ScalingType.STATIC, static_quant_scale=8.0),
        cast_config_weight=CastConfig(ScalingType.STATIC, static_quant_scale=16.0),
        cast_config_grad_output=CastConfig(ScalingType.STATIC, static_quant_scale=1024.0),
    ),
    "frozen": make_blockwise_config(),
    "frozen, float32 scales": make_blockwise_config(power_of_2=False),
    "blockwise, float32 scales": replace(RECIPE_CONFIGS["blockwise"], round_scales_to_power_of_2=False),
    "tensorwise, power-of-two scales": replace(RECIPE_CONFIGS["tensorwise"], round_scales_to_power_of_2=True),
    "tensorwise, weight kept": replace(RECIPE_CONFIGS["tensorwise"], keep_float8_weight_for_backward=True),
    "rowwise, weight kept": replace(RECIPE_CONFIGS["rowwise"], keep_float8_weight_for_backward=True),
    "rowwise, dequantized": Float8LinearConfig.from_recipe_name("rowwise:dequantized"),
    "delayed, dequantized": Float8LinearConfig.from_recipe_name("delayed:dequantized"),
    "blockwise, high precision": Float8LinearConfig.from_recipe_name("blockwise:high_precision"),
    "delayed, most recent": replace(
        RECIPE_CONFIGS["delayed"],
        delayed_scaling_config=DelayedScalingConfig(history_len=2, scale_fn_name="most_recent", margin=1),
    ),
    "delayed, power-of-two scales": replace(RECIPE_CONFIGS["delayed"], round_scales_to_power_of_2=True),
}
GROWTH = (1.0, 4.0, 0.25, 0.25)
"""Factors of all tensors, by step: the second step saturates delayed scales; later ones leave exponents unused."""

SMALL = (((3, 13), 144, 40), ((20,), 40, 136))
"""Tokens, in_features, out_features; no tensor has 8,192 elements, so that a bias is added before the last rounding."""
LARGE = ((2, 80), 144, 200)


def exact_numbers(rows, columns, dtype):
    """Return numbers whose float8 matmuls are exact in float32 in every order, although their casts round.

    They are multiples of 1/8, also when cast: products are multiples of 1/64, and no partial sum takes more than 24
    bits. The amaxes of rows, columns and blocks differ, but are 7 times a power of two, so that no scale rounds: 448
    and 57344 are too. Rows and columns have at least 20 elements.
    """
    numbers = torch.randint(-13, 14, (rows, columns)) + torch.randint(-1, 2, (rows, columns)) / 8
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    sign = torch.randint(2, (rows, columns)) * 2 - 1
    numbers = torch.where((column + 3 * row) % 5 == 0, 14.0 * sign, numbers)
    return (numbers * (1 + row % 2) * (1 + column // 5 % 2)).to(dtype)


def gaussian_numbers(rows, columns, dtype):
    """Return rows of different magnitudes, one with an outlier, one of zeros. Results are finite in float16."""
    numbers = torch.randn(rows, columns) * torch.exp2(torch.randint(-8, 2, (rows, 1)).float())
    numbers[0] = 0
    numbers[-1, columns // 2] = 30
    return numbers.to(dtype)


class Matmuls(TorchDispatchMode):
    """Records the operands of the float8 matmuls of eager linears."""

    def __init__(self):
        super().__init__()
        self.operands = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.quaver.exact_float8_mm.default:
            a, b, a_scale, b_scale = args[:4]
            self.operands[tuple(a.shape)] = a, b, a_scale, b_scale
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reference_matmuls(monkeypatch):
    """Return the operands of the reference's matmuls, by the left one's shape; in high precision their scale is 1."""
    matmuls, multiply = {}, reference.multiply

    def record_and_multiply(a, b, *rest):
        scales = (torch.ones(()) if operand.dequant_scale is None else operand.dequant_scale for operand in (a, b))
        matmuls[tuple(a.data.shape)] = a.data, b.data, *scales
        return multiply(a, b, *rest)

    monkeypatch.setattr(reference, "multiply", record_and_multiply)
    return matmuls


def make_linears(config, shape, dtype, bias, numbers):
    """Return a `Float8Linear` and the reference's linear, with equal parameters."""
    _, in_features, out_features = shape
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(numbers(out_features, in_features, dtype))
        if bias:
            linear.bias.copy_(torch.randint(-64, 65, (out_features,)) / 8)
    expected = ReferenceLinear(in_features, out_features, bias=bias, dtype=dtype, config=config)
    expected.load_state_dict(linear.state_dict())
    return convert_to_float8_training(linear, config=config), expected


def has_delayed_scales(config):
    return any(cast.scaling_type is ScalingType.DELAYED for cast in config.casts.list_casts())


def list_growth(config):
    return GROWTH if has_delayed_scales(config) else GROWTH[:1]


def sync(linear, expected):
    sync_float8_amax_and_scale_history(linear)
    expected.sync()


def assert_steps_are_equal(config, shape, dtype, bias, backend=None):
    torch.manual_seed(0)
    linear, expected = make_linears(config, shape, dtype, bias, exact_numbers)
    leading, in_features, out_features = shape
    tokens = torch.Size(leading).numel()
    run = linear if backend is None else torch.compile(linear, backend=backend, fullgraph=True)
    for growth in list_growth(config):
        input = exact_numbers(tokens, in_features, dtype).view(*leading, in_features) * growth
        grad_output = exact_numbers(tokens, out_features, dtype).view(*leading, out_features) * growth
        actual = compute_results(linear, input, grad_output=grad_output, call=run)
        assert_same(actual, compute_results(expected, input, grad_output=grad_output))
        sync(linear, expected)
        with torch.no_grad():
            linear.weight.mul_(growth)
            expected.weight.mul_(growth)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_A_DTYPE = [(name, DTYPES[(index + shift) % 3]) for shift in range(3) for index, name in enumerate(CONFIGS)]
WITH_A_DTYPE = first(len(CONFIGS), WITH_A_DTYPE)


@pytest.mark.parametrize(("name", "dtype"), WITH_A_DTYPE)
def test_eager_steps_have_the_references_bits(name, dtype):
    for shape, bias in zip(SMALL, (True, False), strict=True):
        assert_steps_are_equal(CONFIGS[name], shape, dtype, bias)
    assert_steps_are_equal(CONFIGS[name], LARGE, dtype, bias=False)


COMPILED = [("delayed", "inductor"), ("static", "aot_eager"), ("frozen", "aot_eager")]
COMPILED += at_night((name, "aot_eager") for name in (*RECIPE_CONFIGS, "rowwise, weight kept"))
COMPILED += at_night((name, "inductor") for name in RECIPE_CONFIGS if name != "delayed")


@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_compiled_steps_have_the_references_bits(name, backend):
    assert_steps_are_equal(CONFIGS[name], SMALL[0], torch.bfloat16, bias=True, backend=backend)


@pytest.mark.parametrize(("name", "dtype"), WITH_A_DTYPE)
def test_codes_and_scales_of_any_numbers_have_the_references_bits(name, dtype, reference_matmuls):
    config = CONFIGS[name]
    in_float8 = sum(not cast.is_disabled for cast in (config.casts.input.row, *config.casts.grad_output[:2]))
    for shape in (*SMALL, LARGE):
        torch.manual_seed(0)
        linear, expected = make_linears(config, shape, dtype, False, gaussian_numbers)
        leading, k, n = shape
        m = torch.Size(leading).numel()
        for growth in list_growth(config):
            input = gaussian_numbers(m, k, dtype).view(*leading, k) * growth
            grad_output = gaussian_numbers(m, n, dtype).view(*leading, n) * growth
            with Matmuls() as matmuls:
                actual = compute_results(linear, input, grad_output=grad_output)
            compute_results(expected, input, grad_output=grad_output)
            assert len(matmuls.operands) == in_float8
            for left, operands in matmuls.operands.items():
                assert_same(operands, reference_matmuls[left])
            for result, left in zip(actual, ((m, k), (m, n), (n, m)), strict=True):
                a, b, a_scale, b_scale = reference_matmuls[left]
                if a_scale.dim() and a_scale.shape != (a.shape[0], 1):
                    a, a_scale = reference.scaling.dequantize(a, a_scale), torch.ones(())
                if b_scale.dim() and b_scale.shape != (1, b.shape[1]):
                    b, b_scale = reference.scaling.dequantize(b, b_scale), torch.ones(())
                assert_matmul_exact(result.reshape(-1, b.shape[1]), a, b, a_scale, b_scale)
            sync(linear, expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", [*RECIPE_CONFIGS, "frozen"])
def test_nonfinite_numbers_reach_the_same_results(name, value):
    """A row, a column, a block or the whole is NaN; delayed scales skip a step whose amax is not finite."""
    config, shape = CONFIGS[name], SMALL[0]
    linear, expected = make_linears(config, shape, torch.float32, True, exact_numbers)
    for broken in (False, True, False):
        input, grad_output = exact_numbers(39, 144, torch.float32), exact_numbers(39, 40, torch.float32)
        if broken:
            input[2, 3] = grad_output[1, 7] = value
        results = compute_results(expected, input, grad_output=grad_output)
        assert results[0].isnan().any() == broken
        assert_same(compute_results(linear, input, grad_output=grad_output), results)
        sync(linear, expected)


def test_exact_numbers_are_exact_and_their_casts_round():
    """Else the tests of bits would depend on a library's order, or would not see which codes are used."""
    numbers, other = exact_numbers(160, 200, torch.float32), exact_numbers(200, 144, torch.float32)
    assert numbers.mul(8).frac().abs().max() == 0
    assert ((numbers.abs() @ other.abs()) * 64).max() < 2**24
    for dim in (None, 0, 1):
        amax = reference.scaling.compute_amax(numbers, dim)
        assert torch.frexp(amax / 7)[0].eq(0.5).all()
        assert dim is None or len(amax.unique()) == 2
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes, _, dequant_scale = reference.scaling.dynamic_cast(numbers, dtype)
        cast = reference.scaling.dequantize(codes, dequant_scale)
        assert not cast.equal(numbers)
        assert cast.mul(8).frac().abs().max() == 0
