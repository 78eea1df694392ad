"""The codes and scales of `mxfp8` are those of torchao's `to_mx`, for every bfloat16 value."""

import pytest
import torch

from quaver.kernels.cast import cast_blockwise
from quaver.recipes import scaling
from tests.reference import every_value

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
config = pytest.importorskip("torchao.prototype.mx_formats.config")


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_codes_and_scales_of_every_bfloat16_value(mode):
    """Each value is the amax of a block of 32; the others are fractions of it."""
    amax = every_value(torch.bfloat16)
    fractions = torch.linspace(1, 0, 32).bfloat16()
    blocks = amax.unsqueeze(1) * fractions
    blocks[:, 0] = amax
    theirs = mx_tensor.to_mx(blocks, torch.float8_e4m3fn, 32, config.ScaleCalculationMode(mode))
    their_scale, their_codes = theirs[:2]
    codes, _, dequant = scaling.dynamic_cast_blocks(blocks, torch.float8_e4m3fn, block_size=(1, 32), rule=mode)
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
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    hp = (torch.randn(64, 160) * torch.logspace(-2, 2, 160)).to(dtype)
    row = cast_blockwise(hp, torch.float4_e2m1fn_x2, True, False, False, 1, 16, "").row
    outer = per_tensor_amax_to_scale(hp.abs().amax().float())
    scales, codes = nvfp4_quantize(hp, 16, outer)
    assert row.outer_scale == outer
    assert torch.equal(scales.view(torch.uint8).view(64, 10), row.dequant_scale.view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), row.data.view(torch.uint8))
