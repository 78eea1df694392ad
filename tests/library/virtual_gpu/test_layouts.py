"""Layouts and backends of operands that were quantized before a matmul, on virtual GPUs; the tests read no kernel."""

import pytest
import torch

pytest.importorskip("triton")

from quaver import Float8LinearConfig
from quaver.experts.gemm import describe_grouped_backends
from quaver.kernels.cast import cast_blockwise
from quaver.kernels.operands import Operand
from quaver.linear import gemm
from quaver.linear.gemm import float8_mm
from quaver.recipes.scale_layout import infer_layout
from tests.reference import assert_same_bits
from tests.virtual_gpu import virtual_gpu

CODES = (torch.arange(32 * 64) * 7).to(torch.uint8).view(32, 64).bitwise_and(0x77).view(torch.float8_e4m3fn)


def test_codes_lie_along_the_contracted_dim_where_the_hardware_multiplies():
    def after(codes, gradient):
        return gemm.lay_out_saved_columns(codes, gradient), gradient + 1

    after = torch.compile(after, backend="aot_eager", fullgraph=True)
    for card, is_native in (("h100", True), ("a100", False)):
        torch.compiler.reset()
        with virtual_gpu(card):
            made = [gemm.lay_out_rows(CODES.t()), gemm.lay_out_columns(CODES), after(CODES, torch.ones(3))[0]]
            assert gemm.lay_out_columns(CODES, emulate=True) is CODES
        for codes in (made[0].t(), *made[1:]):
            assert codes.t().is_contiguous() == is_native
            assert codes.view(torch.uint8).equal(CODES.view(torch.uint8))


@pytest.mark.parametrize(
    ("card", "scales", "powers_of_2", "calls"),
    [
        ("h100", ((), ()), False, {"tensorwise"}),
        ("h100", ((32, 1), ()), False, {"rowwise"}),
        ("b200", ((32, 2), (2, 32)), True, {"BlockWise1x32 x BlockWise1x32"}),
        ("b200", ((32, 2), (2, 32)), False, set()),  # the hardware's scales have no mantissa
        ("b200", ((32, 2), ()), True, set()),  # blocks of one operand
        ("b200", ((32, 1), (64, 1)), True, set()),  # a scale for each contracted element of b
        ("b200", ((32, 2), (64, 1)), True, set()),
        ("h100", ((32, 1), (1, 32)), True, {"rowwise"}),
    ],
)
def test_the_scales_say_who_multiplies(card, scales, powers_of_2, calls):
    a, b, (a_scale, b_scale) = CODES, CODES.t(), (torch.full(shape, 2.0) for shape in scales)
    operands = (Operand(each, s, infer_layout(s, each.shape)) for each, s in ((a, a_scale), (b, b_scale)))
    with virtual_gpu(card) as gpu:
        gemm.find_native_failure(0, gemm.find_kind(*operands) or gemm.ScaleKind.TENSORWISE)  # multiplies, too
        gpu.calls.clear()
        out = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, scales_are_powers_of_2=powers_of_2)
    assert {kind for _, kind in gpu.calls} == calls
    expected = a.double() @ b.double() * 4
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=0)


def test_square_blocks_have_both_layouts_in_compiled_code():
    hp, blocks = torch.randn(64, 96), (torch.float8_e4m3fn, True, True, True, 32, 32, "rceil")

    def tensors(hp):  # Dynamo of torch 2.11 returns no layouts
        return [[each.data, each.dequant_scale, each.quant_scale] for each in cast_blockwise(hp, *blocks)]

    with virtual_gpu("h100"):
        row, column = torch.compile(tensors, backend="aot_eager", fullgraph=True)(hp)
    for made, stored in ((row, row[0]), (column, column[0].t())):
        assert stored.is_contiguous()
        for got, expected in zip(made, tensors(hp)[0], strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize(("card", "backends"), [("h100", "native"), ("a100", "exact")])
def test_backends_of_experts(card, backends):
    with virtual_gpu(card):
        rowwise = Float8LinearConfig.from_recipe_name("rowwise")
        assert describe_grouped_backends(rowwise, torch.device("cpu")) == backends
