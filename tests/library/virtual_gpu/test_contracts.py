"""Tests every contract of the modeled matmuls: they multiply what obeys it exactly and refuse what violates it."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from tests.recipes import E4M3, E5M2
from tests.virtual_gpu import virtual_gpu

E8M0 = torch.float8_e8m0fnu
ROWS_128, SQUARES_128, ROWS_32 = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128, ScalingType.BlockWise1x32


@dataclass(frozen=True)
class Call:
    """The arguments of one matmul."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    recipes: tuple = (ROWS_128, SQUARES_128)
    swizzle: object = SwizzleType.NO_SWIZZLE
    ends: Tensor | None = None

    def scaled_mm(self):
        scales = self.scale_a, self.scale_b
        return torch._scaled_mm(self.a, self.b, *scales, bias=self.bias, out_dtype=self.out_dtype)

    def scaled_mm_v2(self):
        scales = self.scale_a, self.recipes[0], self.scale_b, self.recipes[1]
        return F.scaled_mm(self.a, self.b, *scales, self.swizzle, self.swizzle, self.bias, self.out_dtype)

    def grouped_mm(self):
        return torch._grouped_mm(self.a, self.b, offs=self.ends)

    def scaled_grouped_mm(self):
        scales = self.scale_a, self.scale_b
        return torch._scaled_grouped_mm(self.a, self.b, *scales, offs=self.ends, out_dtype=self.out_dtype)


def draw(*shape, dtype=E4M3):
    return torch.randn(shape).to(dtype)


def shift(matrix):
    """Return a copy with the same strides at an address that is no multiple of 16."""
    shifted = matrix.new_empty(matrix.numel() + 1)[1:].as_strided(matrix.shape, matrix.stride())
    return shifted.copy_(matrix)


def column_major(rows, columns, make=torch.rand):
    return make(columns, rows).t()


def tensorwise():
    return Call(draw(32, 64), draw(48, 64).t(), torch.tensor(0.5), torch.tensor(3.0))


def rowwise():
    return dataclasses.replace(tensorwise(), scale_a=torch.rand(32, 1), scale_b=torch.rand(1, 48))


def blockwise():
    return Call(draw(32, 512), draw(256, 512).t(), column_major(32, 4), column_major(4, 2))


def blocks_of_rows():
    return dataclasses.replace(blockwise(), scale_b=column_major(256, 4), recipes=(ROWS_128, ROWS_128))


def tiled():
    tiles = (torch.randint(120, 130, (count,), dtype=torch.uint8).view(E8M0) for count in (2048, 4096))
    call = Call(draw(32, 512), draw(256, 512).t(), *tiles, swizzle=SwizzleType.SWIZZLE_32_4_4)
    return dataclasses.replace(call, recipes=(ROWS_32, ROWS_32))


ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)


def grouped(dtype=torch.bfloat16):
    return Call(torch.randn(48, 64).to(dtype), draw(3, 32, 64, dtype=dtype).mT, *[torch.ones(())] * 2, ends=ENDS)


def ranged(dtype=torch.bfloat16):
    return Call(draw(32, 48, dtype=dtype), draw(80, 48, dtype=dtype).t(), *[torch.ones(())] * 2, ends=ENDS)


def scaled_groups():
    return dataclasses.replace(grouped(E4M3), scale_a=torch.rand(48), scale_b=torch.rand(3, 32))


def scaled_ranges():
    return dataclasses.replace(ranged(E4M3), scale_a=torch.rand(3 * 32), scale_b=torch.rand(3 * 80))


SUPPORTED = {
    "scaled_mm": (tensorwise, rowwise),
    "scaled_mm_v2": (blockwise, blocks_of_rows),
    "grouped_mm": (grouped, ranged),
    "scaled_grouped_mm": (scaled_groups, scaled_ranges),
}


@pytest.mark.parametrize(
    ("operator", "make", "card"),
    [
        *((operator, make, "h100") for operator, makes in SUPPORTED.items() for make in makes),
        ("scaled_mm", tensorwise, "l40s"),
        ("scaled_mm", tensorwise, "rtx5090"),
        ("scaled_mm_v2", tiled, "b200"),
    ],
)
def test_the_device_multiplies_operands_within_its_contracts(operator, make, card):
    call = make()
    with virtual_gpu(card) as gpu:
        out = getattr(call, operator)()
    assert gpu.calls.total() == 1
    assert out.dtype is torch.bfloat16
    if operator == "scaled_mm":
        expected = (call.a.double() * call.scale_a) @ (call.b.double() * call.scale_b)
        assert out.equal(expected.bfloat16())
    elif operator == "grouped_mm" and make is grouped:
        assert out[:16].equal((call.a[:16].double() @ call.b[0].double()).bfloat16())
        assert out[16:].equal((call.a[16:].double() @ call.b[2].double()).bfloat16())


def changed(**changes):
    """Return a function that replaces arguments of a call by values, or by functions of the old arguments."""

    def change(call):
        values = {name: new(getattr(call, name)) if callable(new) else new for name, new in changes.items()}
        return dataclasses.replace(call, **values)

    return change


REFUSED = [
    ("scaled_mm", tensorwise, changed(), "a100", "sm_89 or newer"),
    ("scaled_mm", tensorwise, changed(a=draw(32, 48)), "h100", "[M, K] and [K, N]"),
    ("scaled_mm", tensorwise, changed(a=lambda a: a.bfloat16()), "h100", "float8 matrices"),
    ("scaled_mm", tensorwise, changed(a=draw(32, 64, dtype=E5M2), b=draw(48, 64, dtype=E5M2).t()), "h100", "in e4m3"),
    ("scaled_mm", tensorwise, changed(a=draw(32, 40), b=draw(48, 40).t()), "h100", "multiples of 16"),
    ("scaled_mm", tensorwise, changed(b=draw(40, 64).t()), "h100", "multiples of 16"),
    ("scaled_mm", tensorwise, changed(a=draw(64, 32).t()), "h100", "a row-major"),
    ("scaled_mm", tensorwise, changed(b=lambda b: b.contiguous()), "h100", "b column-major"),
    ("scaled_mm", tensorwise, changed(a=shift), "h100", "a matrix at a multiple of 16 bytes"),
    ("scaled_mm", tensorwise, changed(scale_b=lambda s: shift(s.view(1)).view(())), "h100", "scale at a mult"),
    ("scaled_mm", tensorwise, changed(scale_a=lambda s: s.double()), "h100", "float32 scales"),
    ("scaled_mm", tensorwise, changed(bias=torch.ones(32).bfloat16()), "h100", "a bias for 48 columns"),
    ("scaled_mm", tensorwise, changed(bias=torch.ones(48)), "h100", "a bias in torch.bfloat16"),
    ("scaled_mm", tensorwise, changed(bias=torch.ones(48), out_dtype=torch.float32), "h100", "no bias with a float32"),
    ("scaled_mm", rowwise, changed(scale_a=torch.rand(32)), "h100", "scales [32, 1] and [1, 48]"),
    ("scaled_mm", rowwise, changed(scale_a=torch.tensor(1.0)), "h100", "scales [32, 1] and [1, 48]"),
    ("scaled_mm", rowwise, changed(scale_a=torch.rand(32, 2)[:, :1]), "h100", "contiguous scales"),
    ("scaled_mm", rowwise, changed(scale_b=shift), "h100", "a scale at a multiple of 16 bytes"),
    ("scaled_mm", rowwise, changed(out_dtype=torch.float32), "h100", "a bfloat16 result"),
    ("scaled_mm", rowwise, changed(), "rtx5090", "no rowwise scales on sm_120"),
    ("scaled_mm_v2", blockwise, changed(), "b200", "need sm_90"),
    ("scaled_mm_v2", blockwise, changed(scale_a=lambda s: s.contiguous()), "h100", "strides (1, 32)"),
    ("scaled_mm_v2", blockwise, changed(scale_a=torch.rand(32, 3)), "h100", "scales (32, 4)"),
    ("scaled_mm_v2", blockwise, changed(scale_b=column_major(2, 4)), "h100", "scales (4, 2)"),
    ("scaled_mm_v2", blockwise, changed(scale_b=lambda s: s.double()), "h100", "float32 scales"),
    ("scaled_mm_v2", blockwise, changed(scale_a=shift), "h100", "a scale at a multiple of 16 bytes"),
    ("scaled_mm_v2", blockwise, changed(a=draw(33, 512), scale_a=column_major(33, 4)), "h100", "columns of scales"),
    ("scaled_mm_v2", blockwise, changed(recipes=(SQUARES_128, SQUARES_128)), "h100", "scales (4, 1)"),
    ("scaled_mm_v2", tiled, changed(), "h100", "need sm_100"),
    ("scaled_mm_v2", tiled, changed(swizzle=SwizzleType.NO_SWIZZLE), "b200", "tiles of 32 x 4 x 4"),
    ("scaled_mm_v2", tiled, changed(scale_a=lambda s: s.float()), "b200", "E8M0 scales"),
    ("scaled_mm_v2", tiled, changed(scale_a=lambda s: s[:512]), "b200", "1 x 4 tiles of 512"),
    ("scaled_mm_v2", tiled, changed(scale_a=shift), "b200", "contiguous scales at a multiple"),
    ("grouped_mm", grouped, changed(a=lambda a: a.float()), "h100", "bfloat16 matrices"),
    ("grouped_mm", grouped, changed(a=shift), "h100", "a at a multiple of 16 bytes"),
    ("grouped_mm", grouped, changed(a=lambda a: a.repeat(1, 2)[:, ::2]), "h100", "strides of a matrix"),
    ("grouped_mm", grouped, changed(a=torch.randn(48, 65).bfloat16()[:, :64]), "h100", "a stride at a multiple"),
    ("grouped_mm", grouped, changed(ends=ENDS.long()), "h100", "int32 ends"),
    ("grouped_mm", grouped, changed(ends=ENDS[1:]), "h100", "an end for each of 3"),
    ("scaled_grouped_mm", scaled_groups, changed(), "l40s", "sm_90 or sm_100"),
    ("scaled_grouped_mm", scaled_groups, changed(a=draw(48, 64, dtype=E5M2)), "h100", "e4m3 matrices"),
    ("scaled_grouped_mm", scaled_groups, changed(b=lambda b: b.contiguous()), "h100", "b column-major"),
    ("scaled_grouped_mm", scaled_groups, changed(a=draw(64, 48).t()), "h100", "a row-major"),
    ("scaled_grouped_mm", scaled_groups, changed(out_dtype=torch.float32), "h100", "a bfloat16 result"),
    ("scaled_grouped_mm", scaled_groups, changed(scale_a=torch.rand(48, 1)), "h100", "scale_a [48]"),
    ("scaled_grouped_mm", scaled_groups, changed(scale_b=torch.rand(32)), "h100", "scale_b (3, 32)"),
    ("scaled_grouped_mm", scaled_ranges, changed(scale_a=torch.rand(32)), "h100", "scale_a [96]"),
    ("scaled_grouped_mm", scaled_ranges, changed(ends=ENDS - 3), "h100", "ends of ranges at multiples of 16"),
]


@pytest.mark.parametrize(("operator", "make", "change", "card", "message"), REFUSED)
def test_the_device_refuses_operands_outside_its_contracts(operator, make, change, card, message):
    with virtual_gpu(card) as gpu, pytest.raises(RuntimeError, match="the device refuses") as error:
        getattr(change(make()), operator)()
    assert message in str(error.value)
    assert not gpu.calls


def test_an_unknown_card_is_refused():
    with pytest.raises(ValueError, match="expected one of a100, .* got 'h900'"), virtual_gpu("h900"):
        pass
