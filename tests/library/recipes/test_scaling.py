"""Tests amax, scale and cast: exhaustively where the domain is finite, against ml_dtypes, eager and compiled."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.recipes import scaling
from quaver.recipes.scaling import (
    EPS,
    amax_to_quant_scale,
    cast_to_float8,
    compute_amax,
    compute_block_amax,
    dequantize,
    dynamic_cast,
    dynamic_cast_blocks,
    multiply_scale_,
    to_dequant_scale,
)
from tests.recipes import E4M3, E5M2
from tests.reference import assert_same_bits, every_value, reference_codes, reference_scales
from tests.steps import assert_same
from tests.thinned import thinned

FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HP = pytest.mark.parametrize("hp_dtype", HP_DTYPES, ids=str)


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@FLOAT8
@pytest.mark.parametrize("hp_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**11, 3.7, 448e12, 1.3e-34], ids=str)
def test_every_16_bit_input_casts_like_ml_dtypes(hp_dtype, float8_dtype, scale):
    hp, quant_scale = every_value(hp_dtype), torch.tensor(scale)
    codes = cast_to_float8(hp, quant_scale, float8_dtype)
    nan = ~hp.isfinite()
    assert codes.float().isnan().equal(nan)
    reference = reference_codes(hp, quant_scale, float8_dtype)
    assert as_bytes(codes)[~nan].equal(torch.from_numpy(reference)[~nan])


@FLOAT8
@pytest.mark.parametrize("hp_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_every_16_bit_amax_has_its_scale(hp_dtype, float8_dtype, power_of_2):
    amaxes = every_value(hp_dtype)
    amaxes = amaxes[~amaxes.signbit()]
    scales = amax_to_quant_scale(amaxes, float8_dtype, power_of_2=power_of_2)
    quant_scales, dequant_scales = reference_scales(amaxes, float8_dtype, power_of_2=power_of_2)
    assert_same_bits(scales, quant_scales)
    assert_same_bits(to_dequant_scale(scales), dequant_scales)


@FLOAT8
def test_the_integers_of_compiled_code_give_the_scales_of_the_division(float8_dtype, monkeypatch):
    """Of all bfloat16 and float16 amaxes, and of float32 ones beside those where the power of two changes."""
    limits = torch.arange(-149, 128).double().exp2()[:, None] * torch.tensor([1.75, 1.0, EPS]).double()
    limits = limits[limits < torch.finfo(torch.float32).max].float()
    neighbours = [limits.nextafter(torch.tensor(end)) for end in (0.0, math.inf)]
    amaxes = [every_value(torch.bfloat16).abs(), every_value(torch.float16).abs(), limits, *neighbours]
    scales = [amax_to_quant_scale(amax, float8_dtype, power_of_2=True) for amax in amaxes]
    monkeypatch.setattr(scaling, "runs_eagerly_on_cpu", lambda tensor: False)
    assert_same([amax_to_quant_scale(amax, float8_dtype, power_of_2=True) for amax in amaxes], scales)


@FLOAT8
@given(value=st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=100, deadline=None)
def test_any_float32_amax_has_its_scale(float8_dtype, value):
    for power_of_2 in (False, True):
        scale = amax_to_quant_scale(torch.tensor(value), float8_dtype, power_of_2=power_of_2)
        assert scale.equal(reference_scales(torch.tensor(value), float8_dtype, power_of_2=power_of_2)[0])
        codes, _, dequant_scale = dynamic_cast(torch.tensor([value, -value]), float8_dtype, power_of_2=power_of_2)
        assert codes.float().isfinite().all()
        assert dequant_scale.isfinite()
        assert dequant_scale > 0


@pytest.mark.parametrize(
    ("hp_dtype", "float8_dtype", "bad", "power_of_2"),
    thinned(HP_DTYPES, (E4M3, E5M2), (math.inf, -math.inf, math.nan), (False, True)),
)
def test_a_non_finite_value_is_never_hidden(hp_dtype, float8_dtype, bad, power_of_2):
    hp = torch.randn(8, 16).to(hp_dtype)
    hp[3, 5] = bad
    codes, _, dequant_scale = dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
    assert (codes.float() * dequant_scale).isnan().all()
    codes, _, dequant_scale = dynamic_cast(hp, float8_dtype, dim=1, power_of_2=power_of_2)
    dequantized = codes.float() * dequant_scale
    assert dequantized[3].isnan().all()
    assert dequantized[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@FLOAT8
@HP
@pytest.mark.parametrize("shape", [(16, 8), (2, 3, 5), (2, 1, 3, 4), (7,), (100, 100), (1, 1)], ids=str)
def test_rowwise_is_tensorwise_row_by_row(hp_dtype, float8_dtype, shape):
    hp = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(hp_dtype)
    for dim in range(-len(shape), len(shape)):
        codes, _, dequant_scale = dynamic_cast(hp, float8_dtype, dim)
        rows, code_rows = hp.movedim(dim, -1), as_bytes(codes).movedim(dim, -1)
        scale_rows = dequant_scale.movedim(dim, -1)
        assert dequant_scale.shape == hp.amax(dim, keepdim=True).shape
        for index in np.ndindex(rows.shape[:-1]):
            expected, _, expected_scale = dynamic_cast(rows[index], float8_dtype)
            assert code_rows[index].equal(as_bytes(expected))
            assert scale_rows[index].item() == expected_scale.item()


@HP
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_empty_tensors_have_an_amax_of_0_and_finite_scales(hp_dtype, shape):
    hp = torch.empty(shape, dtype=hp_dtype)
    assert compute_amax(hp).item() == 0
    for dim in (None, *range(len(shape))):
        codes, _, dequant_scale = dynamic_cast(hp, E4M3, dim)
        assert codes.shape == hp.shape
        assert dequant_scale.shape == compute_amax(hp, dim).shape
        assert dequant_scale.isfinite().all()


@HP
def test_strides_do_not_matter(hp_dtype):
    base = torch.randn(130, 140).to(hp_dtype)
    for view in (base.t(), base[::2, 1::3], base[:1].expand(130, 140), base.flip(0), base[5:, 7:]):
        for dim in (None, 0, 1):
            assert_same(dynamic_cast(view, E4M3, dim), dynamic_cast(view.contiguous(), E4M3, dim))


@HP
def test_amax_is_exact_at_every_size(hp_dtype):
    for size in (1, 2, 7, 8191, 8192, 8193, 100_000):
        hp = torch.randn(size).to(hp_dtype)
        hp[size // 2] = -30.5
        assert compute_amax(hp).item() == 30.5
        hp[size // 3] = math.nan
        assert compute_amax(hp).isnan()


@pytest.mark.parametrize(
    ("hp_dtype", "float8_dtype", "dim", "power_of_2"),
    thinned(HP_DTYPES, (E4M3, E5M2), (None, 0, 1), (False, True), together=1),
)
def test_compiled_code_gives_the_same_bits(hp_dtype, float8_dtype, dim, power_of_2):
    compiled = torch.compile(dynamic_cast, fullgraph=True)
    for magnitude in (1.0, 3e-13, 1e30 if hp_dtype is not torch.float16 else 1e4):
        hp = (torch.randn(256, 64) * magnitude).to(hp_dtype)
        expected = dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)
        assert_same(compiled(hp, float8_dtype, dim, power_of_2=power_of_2), expected)


def test_compiled_casts_and_scales_agree_on_every_bfloat16():
    def casts_and_scales(hp, quant_scale):
        codes = [cast_to_float8(hp, quant_scale, float8_dtype) for float8_dtype in (E4M3, E5M2)]
        return *codes, to_dequant_scale(amax_to_quant_scale(hp.abs(), E4M3))

    hp = every_value(torch.bfloat16)
    hp = hp[~hp.isnan()]
    compiled = torch.compile(casts_and_scales, fullgraph=True)
    for scale in (1.0, 3.7):
        assert_same(compiled(hp, torch.tensor(scale)), casts_and_scales(hp, torch.tensor(scale)))


def make_weight(rows: int, columns: int) -> torch.Tensor:
    """Return a weight with a different magnitude in each block, an outlier, and a block of zeros."""
    weight = torch.randn(rows, columns) * torch.logspace(-6, 3, rows).view(-1, 1) * torch.logspace(-2, 2, columns)
    weight[0, 0] = 1000
    weight[128:, :128] = 0
    return weight


def test_transformers_dequantizes_to_the_same_bits():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, _, dequant_scale = dynamic_cast_blocks(make_weight(256, 384), E4M3)
    assert dequantize(codes, dequant_scale).equal(fp8.Fp8Dequantize(None)._dequantize_one(codes, dequant_scale))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_make_their_block_nan_and_no_other(value):
    hp = make_weight(200, 200)
    hp[150, 3] = value
    codes, _, dequant_scale = dynamic_cast_blocks(hp, E4M3)
    nan = dequantize(codes, dequant_scale).isnan()
    assert nan[128:, :128].all()
    assert nan.sum() == 72 * 128


def test_every_granularity_dequantizes():
    codes = torch.randn(130, 5).to(E4M3)
    for scale in (torch.tensor(3.0), torch.rand(130, 1), torch.rand(1, 5)):
        assert dequantize(codes, scale).equal(codes.float() * scale)
    scale = torch.tensor([[2.0], [4.0]])
    assert dequantize(codes, scale)[127:129].equal(codes[127:129].float() * scale)


def test_bad_input_says_what_was_expected():
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="expected a tensor of torch.float32"):
            compute_amax(torch.zeros(4).to(dtype))
    with pytest.raises(ValueError, match="expected a matrix of torch.float32.*got torch.int32"):
        compute_block_amax(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expected a matrix.*of \[2\]"):
        dynamic_cast_blocks(torch.ones(2), E4M3)
    with pytest.raises(ValueError, match=r"\[2, 1\] \(blockwise 128 x 128\).* matrix of \[130, 5\], got \[3, 1\]"):
        multiply_scale_(torch.ones(130, 5), torch.ones(3, 1))
