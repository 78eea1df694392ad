"""Tests layouts and backends of operands that were quantized before a matmul, on virtual GPUs."""

import pytest
import torch

pytest.importorskip("triton")

from quaver import Float8LinearConfig
from quaver.experts.gemm import describe_grouped_backends
from quaver.kernels import native_mm
from quaver.kernels.cast import cast_blockwise
from quaver.kernels.operands import Operand
from quaver.linear import backends, gemm
from quaver.linear.gemm import float8_mm
from quaver.recipes.scale_layout import infer_layout
from tests.steps import assert_same
from tests.virtual_gpu import virtual_gpu

CODES = (torch.arange(32 * 64) * 7).to(torch.uint8).view(32, 64).bitwise_and(0x77).view(torch.float8_e4m3fn)


def test_codes_lie_along_the_contracted_dim_where_the_hardware_multiplies():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def lay_out_and_add(codes, gradient):
        return gemm.lay_out_saved_columns(codes, gradient), gradient + 1

    for card, is_native in (("h100", True), ("a100", False)):
        torch.compiler.reset()
        with virtual_gpu(card):
            rows, columns = gemm.lay_out_rows(CODES.t()), gemm.lay_out_columns(CODES)
            saved_columns, _ = lay_out_and_add(CODES, torch.ones(3))
            assert gemm.lay_out_columns(CODES, emulate=True) is CODES
        for codes in (rows.t(), columns, saved_columns):
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
def test_the_shapes_of_scales_choose_the_matmul(card, scales, powers_of_2, calls):
    a, b, (a_scale, b_scale) = CODES, CODES.t(), (torch.full(shape, 2.0) for shape in scales)
    pairs = (a, a_scale), (b, b_scale)
    operands = (Operand(codes, scale, infer_layout(scale, codes.shape)) for codes, scale in pairs)
    with virtual_gpu(card) as gpu:
        backends.find_native_failure(0, native_mm.find_scale_kind(*operands) or native_mm.ScaleKind.TENSORWISE)
        gpu.calls.clear()
        out = float8_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, scales_are_powers_of_2=powers_of_2)
    assert {kind for _, kind in gpu.calls} == calls
    expected = a.double() @ b.double() * 4
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=0)


def test_square_blocks_have_both_layouts_in_compiled_code():
    hp, blocks = torch.randn(64, 96), (torch.float8_e4m3fn, True, True, True, 32, 32, "rceil")

    def cast(hp):  # Dynamo of torch 2.11 returns no layouts
        operands = cast_blockwise(hp, *blocks)
        return [[operand.data, operand.dequant_scale, operand.quant_scale] for operand in operands]

    with virtual_gpu("h100"):
        row, column = torch.compile(cast, backend="aot_eager", fullgraph=True)(hp)
    assert row[0].is_contiguous()
    assert column[0].t().is_contiguous()
    expected, _ = cast(hp)
    assert_same([row, column], [expected, expected])


@pytest.mark.parametrize(("card", "backends"), [("h100", "native"), ("a100", "exact")])
def test_experts_multiply_on_the_backends_of_their_card(card, backends):
    with virtual_gpu(card):
        rowwise = Float8LinearConfig.from_recipe_name("rowwise")
        assert describe_grouped_backends(rowwise, torch.device("cpu")) == backends
