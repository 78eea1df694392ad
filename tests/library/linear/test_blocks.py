"""Tests scales of blocks: E8M0, ragged edges, outliers, and which results a token's neighbours can change."""

import math

import pytest
import torch
from torch import nn

from quaver import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training
from quaver.linear.gemm import float8_mm
from quaver.linear.quantize import Quantizer
from quaver.recipes import e8m0, scaling
from quaver.recipes.config import BLOCK_SIZES
from quaver.recipes.scale_layout import ScaleLayout
from tests.recipes import BLOCK_RECIPES, E4M3, E5M2
from tests.reference import (
    assert_matmul_exact,
    assert_same_bits,
    every_value,
    reference_cast,
    reference_scales,
    sqnr_db,
)
from tests.thinned import thinned


def compute_e8m0_exponent(amax, largest, mode):
    """Return the exponent of the dequant_scale of one amax, in exact arithmetic; None for NaN."""
    if not math.isfinite(amax):
        return None
    if amax == 0:
        return -127
    below = math.frexp(amax)[1] - 1  # floor(log2 amax)
    if mode == "floor":
        return max(below - (math.frexp(largest)[1] - 1), -127)
    exponent = max(below - math.frexp(largest)[1], -127)
    while math.ldexp(largest, exponent) < amax:
        exponent += 1
    return exponent


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_e8m0_scales_are_right_for_every_bfloat16_amax(dtype, largest, mode):
    """Of zero, subnormals, infinities and NaNs too."""
    amax = every_value(torch.bfloat16)
    amax = amax[(amax > 0) | amax.isnan() | (amax == 0)].abs()
    quant, dequant = e8m0.compute_scales(amax, dtype, mode)
    for value, q, d in zip(amax.tolist(), quant.tolist(), dequant.tolist(), strict=True):
        exponent = compute_e8m0_exponent(value, largest, mode)
        expected = (math.nan, math.nan) if exponent is None else (2.0**-exponent, 2.0**exponent)
        assert (q, d) == pytest.approx(expected, rel=0, abs=0, nan_ok=True), value


@pytest.mark.parametrize(
    ("shape", "size", "mode", "dtype"),
    thinned(
        [(130, 300), (128, 128), (1, 1), (31, 33), (0, 40), (40, 0)],
        BLOCK_SIZES,
        ("float32", "power of 2", "rceil"),
        (torch.float32, torch.bfloat16, torch.float16),
    ),
)
def test_each_block_is_cast_as_a_matrix(shape, size, mode, dtype):
    """Each block is cast as a separate matrix would be, in any layout of the matrix; the last blocks are cut."""
    power_of_2, mode = mode != "float32", "rceil" if mode == "rceil" else ""
    hp = (torch.randn(shape) * torch.logspace(-2, 2, max(shape[1], 1))[: shape[1]]).to(dtype)
    hp[: size[0], : size[1]] = 0
    options = {"power_of_2": power_of_2, "block_size": size, "rule": mode}
    codes, quant, dequant = scaling.dynamic_cast_blocks(hp.t().contiguous().t(), E4M3, **options)
    assert codes.shape == hp.shape
    assert codes.is_contiguous()
    assert quant.shape == dequant.shape == ScaleLayout(*size).get_scale_shape(*shape)
    for i in range(quant.shape[0]):
        for j in range(quant.shape[1]):
            rows, columns = (slice(k * n, (k + 1) * n) for k, n in zip((i, j), size, strict=True))
            amax = hp[rows, columns].abs().amax()
            expected_scale = reference_scales(amax, E4M3, power_of_2=power_of_2)[0] if amax else torch.tensor(1.0)
            if mode and not amax:
                expected_scale = torch.tensor(2.0**127)
            assert_same_bits(quant[i, j], expected_scale)
            assert_same_bits(codes[rows, columns], reference_cast(hp[rows, columns], expected_scale, E4M3))
    values = scaling.dequantize(codes, dequant)
    assert_same_bits(values, codes.float() * spread_scale(dequant, shape, size))


def spread_scale(scale, shape, size):
    """Return the scale of each element."""
    return scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("powers_of_2", [True, False])
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(
    "sizes", [((1, 128), (128, 128)), ((1, 32), (32, 32)), ((1, 128), (128, 1)), ((1, 32), (32, 1))]
)
def test_the_matmul_of_blocks_is_exact(sizes, pad, powers_of_2, out_dtype):
    """Scales that differ by factors of 2^12 between the blocks of one sum; ragged, and long enough for panels."""
    torch.manual_seed(0)
    a_size, b_size = sizes
    for m, k, n in ((70, 200, 50), (1100, 520, 300), (40, 390, 1200)):
        a, b = (torch.randn(shape).to(E4M3) for shape in ((m, k), (k, n)))
        a_scale, b_scale = (
            torch.exp2(torch.randint(-6, 7, ScaleLayout(*size).get_scale_shape(*codes.shape)).float())
            for codes, size in ((a, a_size), (b, b_size))
        )
        if not powers_of_2:
            a_scale, b_scale = a_scale * 1.375, b_scale * 1.625  # products with codes have 24 bits at most
        out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, scales_are_powers_of_2=powers_of_2, pad=pad)
        spread = spread_scale(a_scale, (m, k), a_size), spread_scale(b_scale, (k, n), b_size)
        assert_matmul_exact(out, a, b, *spread)


SQNR_WITH_OUTLIER = {(): 0.0, (128, 128): 12.0, (32, 32): 23.6, "row": 25.9, (1, 128): 29.2, (1, 32): 30.7}
ZEROS_OF_SCALED_COLUMNS = {(): 0.66, "row": 0.57, (128, 128): 0.49, (1, 128): 0.37, (32, 32): 0.29, (1, 32): 0.21}


def quantize_and_dequantize(hp, size):
    if size in ((), "row"):
        codes, _, dequant = scaling.dynamic_cast(hp, E4M3, 1 if size else None, power_of_2=True)
    else:
        codes, _, dequant = scaling.dynamic_cast_blocks(hp, E4M3, power_of_2=True, block_size=size)
    return scaling.dequantize(codes, dequant)


def test_one_outlier_costs_the_others_what_the_docs_say():
    """docs/numerics.md: one element of 1e6 among 512 x 512 Gaussian ones; SQNR of the others, in dB."""
    torch.manual_seed(0)
    hp = torch.randn(512, 512)
    hp[100, 100] = 1e6
    others = torch.ones_like(hp, dtype=torch.bool)
    others[100, 100] = False
    for size, expected in SQNR_WITH_OUTLIER.items():
        assert abs(sqnr_db(hp[others], quantize_and_dequantize(hp, size)[others]) - expected) < 0.3, size


def test_unequal_columns_underflow_as_the_docs_say():
    """docs/numerics.md: 1024 x 1024 Gaussian numbers, columns times 2^(6 N), N Gaussian."""
    torch.manual_seed(0)
    hp = torch.randn(1024, 1024) * torch.exp2(6 * torch.randn(1024))
    for size, expected in ZEROS_OF_SCALED_COLUMNS.items():
        assert abs((quantize_and_dequantize(hp, size) == 0).float().mean() - expected) < 0.02, size


def make_linear(recipe, dtype=torch.bfloat16):
    return convert_to_float8_training(nn.Linear(200, 150, dtype=dtype), config=recipe)


PREFIX_INVARIANT = {
    recipe.value: not recipe.value.startswith(("tensorwise", "delayed")) for recipe in Float8LinearRecipeName
}


@pytest.mark.parametrize("recipe", PREFIX_INVARIANT)
def test_later_tokens_change_no_earlier_output_where_documented(recipe):
    """docs/numerics.md: whether later tokens can change the outputs of earlier ones."""
    linear, input = make_linear(recipe), torch.randn(1, 64, 200, dtype=torch.bfloat16)
    changed = input.clone()
    changed[:, 40:] *= 1000
    with torch.no_grad():
        same = linear(input)[:, :40].equal(linear(changed)[:, :40])
    assert same == PREFIX_INVARIANT[recipe]


@pytest.mark.parametrize("recipe", [recipe for recipe, holds in PREFIX_INVARIANT.items() if holds])
def test_the_codes_of_a_token_do_not_depend_on_the_batch(recipe):
    """docs/numerics.md: the codes and scales of a token do not depend on how many are in the batch."""
    casts, input = Float8LinearConfig.from_recipe_name(recipe).casts.input, torch.randn(300, 200)
    whole = Quantizer(casts, torch.float32)(input, row=True, column=False).row
    for tokens in (1, 2, 31, 128, 200):
        part = Quantizer(casts, torch.float32)(input[:tokens], row=True, column=False).row
        assert_same_bits(part.data, whole.data[:tokens])
        assert_same_bits(part.dequant_scale, whole.dequant_scale[:tokens])


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_an_infinite_token_affects_only_its_own_results(recipe):
    """inf in a token: its output is NaN, other tokens' are not. In float32: oneDNN's bfloat16 matmul spreads NaNs."""
    linear = make_linear(recipe, torch.float32)
    input = torch.randn(70, 200)
    input[5, 3] = math.inf
    broken = linear(input).isnan()
    assert broken[5].all()
    assert broken.sum() == broken[5].sum()
