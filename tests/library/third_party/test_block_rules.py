"""Compares codes and scales of blocks with the rules of other libraries (docs/numerics.md).

There is one block for each finite bfloat16 amax, whose other elements are fractions of it. A rule returns the codes of
the block and the dequant_scale that it stores. MXFP8 and NVFP4 are compared with torchao's functions.
"""

from types import SimpleNamespace

import pytest
import torch

from quaver.kernels.cast import cast_blockwise
from quaver.recipes import scaling
from tests.recipes import E4M3
from tests.reference import assert_same_bits, every_value

MAX = 448.0


def make_blocks():
    """Return blocks [n, 32] with every finite amax above 0."""
    amax = every_value(torch.bfloat16)
    amax = amax[amax.isfinite() & (amax > 0)]
    fractions = torch.cat([torch.ones(1), torch.rand(31, generator=torch.Generator().manual_seed(0)) * 2 - 1])
    return amax.float().unsqueeze(1) * fractions


def deepseek_v3(hp, amax, power_of_2):
    """s = amax / 448, optionally 2^ceil(log2 s); y = x / s. No floor."""
    scale = amax / MAX
    mantissa, exponent = torch.frexp(scale)
    scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()) if power_of_2 else scale
    return (hp / scale).to(E4M3), scale


def deepgemm(hp, amax, power_of_2):
    """sf = max(amax, 1e-4) / 448; on SM100 a power of two, by the bits; y = x * (1 / sf)."""
    scale = amax.clamp(1e-4) / MAX
    if power_of_2:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).clamp(1, 254)
        scale = (exponent << 23).view(torch.float32)
    return (hp * (1 / scale)).to(E4M3), scale


def torchao(hp, amax, power_of_2):
    """RN32(448 / max(amax, 1e-12)) in float64; 1 / scale is stored."""
    quant = (MAX / amax.double().clamp(1e-12)).float()
    return (hp * quant).clamp(-MAX, MAX).to(E4M3), 1 / quant


def transformer_engine(hp, amax, power_of_2):
    """448 / amax in float32, 1 where amax is 0; by default the mantissa is cleared."""
    quant = torch.where(amax > 0, torch.full_like(amax, MAX) / amax, 1.0)
    quant = (quant.view(torch.int32) & ~0x7FFFFF).view(torch.float32) if power_of_2 else quant
    return (hp * quant).clamp(-MAX, MAX).to(E4M3), 1 / quant


def transformers(hp, amax, power_of_2):
    """transformers' own function."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=(1, 32), scale_fmt="ue8m0" if power_of_2 else "float")
    quantize = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors = quantize.convert({"a.weight": hp})
    return tensors["a.weight"], tensors["a.weight_scale_inv"].float()


RULES = {rule.__name__: rule for rule in (deepseek_v3, deepgemm, torchao, transformer_engine, transformers)}
FLOORS = {"deepgemm": 1e-4}
"""The amaxes from which a rule is quaver's; 1e-12, quaver's own, for the rules that have none."""
ULPS = {"transformers": 4}
"""How far float32 scales are apart; transformers' 448 / amax is 448 times a rounded reciprocal, and rounded again."""


CASES = [(rule, power_of_2) for rule in RULES for power_of_2 in (True, False)]
CASES.remove(("torchao", True))


@pytest.mark.parametrize(("rule", "power_of_2"), CASES)
def test_codes_and_scales_agree_where_no_floor_acts(rule, power_of_2):
    """Powers of two and torchao's: equal to the bit. Others: scales to a few ulps, and codes at rounding boundaries."""
    hp = make_blocks()
    hp = hp[hp[:, 0] >= FLOORS.get(rule, 1e-12)]
    codes, _, dequant = scaling.dynamic_cast_blocks(hp, E4M3, block_size=(1, 32), power_of_2=power_of_2)
    their_codes, their_scale = RULES[rule](hp, hp.abs().amax(1, keepdim=True), power_of_2)
    if power_of_2 or rule == "torchao":
        assert_same_bits(dequant, their_scale)
        assert_same_bits(codes, their_codes)
    else:
        assert (dequant.view(torch.int32) - their_scale.view(torch.int32)).abs().max() <= ULPS.get(rule, 1)
        steps = (codes.view(torch.int8).int() - their_codes.view(torch.int8).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_block_of_zeros_has_the_scale_of_its_rule(rule):
    hp = torch.zeros(1, 32)
    codes, scale = RULES[rule](hp, hp[:, :1], False)
    assert codes.float().isnan().all() == (rule == "deepseek_v3")
    expected = {"deepseek_v3": 0.0, "deepgemm": 1e-4 / MAX, "torchao": 1e-12 / MAX}.get(rule, 1.0)
    torch.testing.assert_close(scale.item(), expected)
    own_codes, _, own_scale = scaling.dynamic_cast_blocks(hp, E4M3, block_size=(1, 32))
    assert own_scale == 1
    assert not own_codes.float().any()


@pytest.mark.parametrize("rule", ["deepseek_v3", "transformer_engine", "transformers"])
def test_tiny_blocks_keep_their_own_scale_elsewhere(rule):
    """quaver's floor makes blocks below 1e-12 * 2^-10 / 448 zero; without one they stay numbers."""
    hp = torch.full((1, 32), 2.0**-60)
    codes, scale = RULES[rule](hp, hp[:, :1], True)
    torch.testing.assert_close(codes.float() * scale, hp)
    own_codes, _, own_scale = scaling.dynamic_cast_blocks(hp, E4M3, block_size=(1, 32), power_of_2=True)
    assert not own_codes.float().any()
    assert own_scale == scaling.dynamic_cast_blocks(hp * 0 + 1e-12, E4M3, block_size=(1, 32), power_of_2=True)[2]
    e8m0_codes, _, e8m0_scale = scaling.dynamic_cast_blocks(hp, E4M3, block_size=(1, 32), rule="rceil")
    assert_same_bits(e8m0_codes, codes)
    assert_same_bits(e8m0_scale, scale)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_mxfp8_has_the_codes_and_scales_of_torchaos_to_mx(mode):
    """Each value is the amax of a block of 32; the others are fractions of it."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    amax = every_value(torch.bfloat16)
    blocks = amax.unsqueeze(1) * torch.linspace(1, 0, 32).bfloat16()
    blocks[:, 0] = amax
    theirs = mx_tensor.to_mx(blocks, E4M3, 32, config.ScaleCalculationMode(mode))
    their_scale, their_codes = theirs[:2]
    codes, _, dequant = scaling.dynamic_cast_blocks(blocks, E4M3, block_size=(1, 32), rule=mode)
    finite = blocks.isfinite().all(1)
    bytes_of = dequant.to(torch.float8_e8m0fnu).view(torch.uint8).flatten()
    their_bytes = their_scale.view(torch.uint8).flatten()
    assert bytes_of[finite].equal(their_bytes[finite])
    assert (bytes_of[~finite] == 255).all()
    assert (their_bytes[~finite] == 255).all()
    same = finite & (bytes_of > 0)  # torchao makes zeros of blocks with the smallest scale
    assert codes[same].view(torch.uint8).equal(their_codes.view(blocks.shape)[same].view(torch.uint8))
    assert codes[finite & ~same].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e2m1_has_the_codes_and_scales_of_nvfp4(dtype):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    hp = (torch.randn(64, 160) * torch.logspace(-2, 2, 160)).to(dtype)
    row = cast_blockwise(hp, torch.float4_e2m1fn_x2, True, False, False, 1, 16, "").row
    outer = nvfp4.per_tensor_amax_to_scale(hp.abs().amax().float())
    scales, codes = nvfp4.nvfp4_quantize(hp, 16, outer)
    assert row.outer_scale == outer
    assert torch.equal(scales.view(torch.uint8).view(64, 10), row.dequant_scale.view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), row.data.view(torch.uint8))
