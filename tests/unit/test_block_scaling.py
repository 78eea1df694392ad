"""128 x 128 blocks: the oracle against the formulas of torchao (to the bit), transformers and DeepGEMM."""

from types import SimpleNamespace

import pytest
import torch

from quaver.scaling import block_amax, dequantize, dynamic_cast, dynamic_cast_blocks, multiply_scale_

E4M3 = torch.float8_e4m3fn
POWER_OF_2 = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power of two"])


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A different magnitude in each block, an outlier, and a block of zeros where there is more than one."""
    magnitude = torch.logspace(-6, 3, rows).view(-1, 1) * torch.logspace(-2, 2, columns)
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * magnitude
    made[0, 0] = 1000
    if rows > 128:
        made[128:, :128] = 0
    return made.to(dtype)


def torchao_cast(hp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao/prototype/blockwise_fp8_training/kernels.py: s = float32(448 / float64 amax); stores 1 / s."""
    blocks = hp.view(hp.shape[0] // 128, 128, hp.shape[1] // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True).to(torch.float64).clamp(min=1e-12)
    quant_scale = (448.0 / amax).to(torch.float32)
    return (blocks * quant_scale).clamp(-448, 448).to(E4M3).view(hp.shape), (1.0 / quant_scale)[:, 0, :, 0]


def deepgemm_cast(hp: torch.Tensor, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """deep_gemm/utils/math.py, per_block_cast_to_fp8: sf = amax / 448; y = x * (1 / sf)."""
    blocks = hp.float().view(hp.shape[0] // 128, 128, hp.shape[1] // 128, 128)
    sf = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
    if ue8m0:
        bits = sf.view(torch.int32)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
        sf = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return (blocks * (1 / sf)).to(E4M3).view(hp.shape), sf[:, 0, :, 0]


def transformers_cast(hp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    made = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": hp})
    return made["a.weight"], made["a.weight_scale_inv"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_torchao_to_the_bit(dtype):
    hp = weight(384, 256, dtype)
    theirs, their_scale = torchao_cast(hp)
    codes, quant_scale, dequant_scale = dynamic_cast_blocks(hp, E4M3)
    assert as_bytes(codes).equal(as_bytes(theirs))
    zeros = hp.view(3, 128, 2, 128).abs().amax((1, 3)) == 0
    assert zeros.sum() == 2
    assert quant_scale[zeros].eq(1).all()
    assert dequant_scale[zeros].eq(1).all()
    assert dequant_scale[~zeros].equal(their_scale[~zeros])


@pytest.mark.parametrize("theirs", [transformers_cast, deepgemm_cast])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_and_deepgemm_differ_at_rounding_boundaries_alone(theirs, dtype):
    hp = weight(256, 384, dtype)
    hp[128:, :128] = 1
    their_codes, their_scale = theirs(hp)
    codes, _, dequant_scale = dynamic_cast_blocks(hp, E4M3)
    ulps = (dequant_scale.view(torch.int32) - their_scale.view(torch.int32)).abs()
    apart = (as_bytes(codes).int() - as_bytes(their_codes).int()).abs()
    assert ulps.max() <= 1
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-3


def test_powers_of_two_are_those_of_deepgemm():
    hp = weight(256, 384)
    hp[128:, :128] = 1
    theirs, their_scale = deepgemm_cast(hp, ue8m0=True)
    codes, _, dequant_scale = dynamic_cast_blocks(hp, E4M3, power_of_2=True)
    assert dequant_scale.equal(their_scale)
    assert as_bytes(codes).equal(as_bytes(theirs))


def test_transformers_dequantizes_to_the_same_bits():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, _, dequant_scale = dynamic_cast_blocks(weight(256, 384), E4M3)
    assert dequantize(codes, dequant_scale).equal(fp8.Fp8Dequantize(None)._dequantize_one(codes, dequant_scale))


@POWER_OF_2
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 513), (5, 400), (0, 128), (128, 0)], ids=str)
def test_each_block_is_a_tensorwise_cast_of_it(shape, power_of_2):
    hp = weight(*shape) if shape[0] * shape[1] else torch.empty(shape)
    codes, quant_scale, dequant_scale = dynamic_cast_blocks(hp.t().contiguous().t(), E4M3, power_of_2=power_of_2)
    assert codes.is_contiguous()
    assert quant_scale.shape == dequant_scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for row in range(quant_scale.shape[0]):
        for column in range(quant_scale.shape[1]):
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            if not hp[at].any():
                assert quant_scale[row, column] == 1
                assert not as_bytes(codes)[at].any()
                continue
            block, quant, dequant = dynamic_cast(hp[at], E4M3, power_of_2=power_of_2)
            assert as_bytes(codes)[at].equal(as_bytes(block))
            assert (quant_scale[row, column], dequant_scale[row, column]) == (quant, dequant)
            assert dequantize(codes, dequant_scale)[at].equal(dequantize(block, dequant))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_make_their_block_nan_and_no_other(value):
    hp = weight(200, 200)
    hp[150, 3] = value
    codes, _, dequant_scale = dynamic_cast_blocks(hp, E4M3)
    nan = dequantize(codes, dequant_scale).isnan()
    assert nan[128:, :128].all()
    assert nan.sum() == 72 * 128


def test_every_granularity_dequantizes():
    codes = torch.randn(130, 5).to(E4M3)
    for scale in (torch.tensor(3.0), torch.rand(130, 1), torch.rand(1, 5)):
        assert dequantize(codes, scale).equal(codes.float() * scale)
    assert dequantize(codes, torch.tensor([[2.0], [4.0]]))[127:129].equal(
        codes[127:129].float() * torch.tensor([[2], [4]])
    )


def test_bad_input_says_what_was_expected():
    with pytest.raises(ValueError, match="expected a matrix of torch.float32.*got torch.int32"):
        block_amax(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expected a matrix.*of \[2\]"):
        dynamic_cast_blocks(torch.ones(2), E4M3)
    with pytest.raises(ValueError, match=r"\[2, 1\] \(128 x 128 blocks\) for a matrix of \[130, 5\], got \[3, 1\]"):
        multiply_scale_(torch.ones(130, 5), torch.ones(3, 1))
