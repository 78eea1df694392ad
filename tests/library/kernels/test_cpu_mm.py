"""Tests that the float8 matmul in C is bit-identical to a loop over k in float32, and close to float64."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

from quaver.kernels import cpu
from tests.recipes import E4M3, E5M2
from tests.reference import assert_same_bits
from tests.thinned import thinned

OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
DEPTH = 2048  # numbers of a slab of a sum (quaver/csrc/matmul.h)
SHAPES = [(1, 1, 1), (16, 16, 32), (17, 33, 15), (9, 34, 47), (33, 70, 50), (1, 64, 100), (65, 1, 40), (50, 65, 1)]
SHAPES += [(100, DEPTH + 1, 70), (70, 2 * DEPTH, 301), (301, 2 * DEPTH + 30, 66), (3, 2000, 5)]
SHAPES += [(700, 1040, 530)]  # more than a panel of the smaller operand
NAN, INF = float("nan"), float("inf")
ONE = torch.tensor(1.0)

pytestmark = pytest.mark.skipif(not cpu.HAS_MM, reason="quaver's matmul does not run on this CPU")


def draw_codes(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every finite number of a format, subnormals and both zeros included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    values = bits.view(dtype).float()
    return torch.where(values.isfinite(), bits, torch.zeros((), dtype=torch.uint8)).view(dtype)


def sum_by_slabs(a: Tensor, b: Tensor) -> Tensor:
    """By ascending k in slabs of DEPTH. Products of float8 numbers are exact in float32, so each step rounds once."""
    left, right = a.float().t().contiguous(), b.float()
    sums = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], DEPTH):
        slab = torch.zeros_like(sums)
        for k in range(start, min(start + DEPTH, a.shape[1])):
            slab += left[k].unsqueeze(1) * right[k]
        sums += slab
    return sums


def to_column_major(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def every_other(matrix: Tensor) -> Tensor:
    """Return the same numbers, neither rows nor columns contiguous."""
    rows, columns = matrix.shape
    wide = torch.full((2 * rows + 1, 2 * columns + 1), 0x7F, dtype=torch.uint8)
    wide[: 2 * rows : 2, : 2 * columns : 2] = matrix.view(torch.uint8)
    return wide.view(matrix.dtype)[: 2 * rows : 2, : 2 * columns : 2]


def slice_wider(matrix: Tensor) -> Tensor:
    """Return the same numbers, with NaNs around them in memory."""
    rows, columns = matrix.shape
    wide = torch.full((rows + 2, columns + 3), 0x7F, dtype=torch.uint8)
    wide[1:-1, 1:-2] = matrix.view(torch.uint8)
    return wide.view(matrix.dtype)[1:-1, 1:-2]


def slice_taller(matrix: Tensor) -> Tensor:
    return slice_wider(matrix.t()).t()


@pytest.mark.parametrize(("shape", "formats", "threads"), thinned(SHAPES, FORMATS, (1, 3)), indirect=["threads"])
def test_every_element_is_the_sum_by_slabs_scaled_once_and_rounded_once(shape, formats, threads):
    m, k, n = shape
    a, b = draw_codes((m, k), formats[0]), draw_codes((k, n), formats[1], seed=1)
    sums = sum_by_slabs(a, b)
    row_scale, column_scale = torch.rand(m, 1) + 0.1, (torch.rand(1, n) + 0.1) * 2**-20
    a_tensor_scale, b_tensor_scale, bias = torch.tensor(0.37), torch.tensor(2.0**-18), torch.randn(n)
    for layout_a, layout_b in itertools.product((Tensor.contiguous, to_column_major), repeat=2):
        for a_scale, b_scale in itertools.product((a_tensor_scale, row_scale), (b_tensor_scale, column_scale)):
            for out_dtype in OUT_DTYPES:
                scaled = sums * (a_scale * b_scale)
                actual = cpu.mm(layout_a(a), layout_b(b), a_scale, b_scale, None, out_dtype)
                assert_same_bits(actual, scaled.to(out_dtype))
        actual = cpu.mm(layout_a(a), layout_b(b), row_scale, column_scale, bias, torch.bfloat16)
        assert_same_bits(actual, (sums * (row_scale * column_scale) + bias).bfloat16())
    for layout in (every_other, slice_wider, slice_taller):
        for left, right in ((layout(a), b), (a, layout(b))):
            actual = cpu.mm(left, right, a_tensor_scale, b_tensor_scale, None, torch.float32)
            assert_same_bits(actual, sums * (a_tensor_scale * b_tensor_scale))


def test_scales_may_have_any_strides_and_biases_any_dtype():
    a, b = draw_codes((20, 40), E4M3), draw_codes((40, 30), E4M3, seed=1)
    row_scale, column_scale, bias = torch.rand(20, 3)[:, 1:2], torch.rand(60, 1)[::2].t(), torch.randn(60)[::2]
    sums = sum_by_slabs(a, b)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        actual = cpu.mm(a, b, row_scale, column_scale, bias.to(dtype), torch.float32)
        assert_same_bits(actual, sums * (row_scale * column_scale) + bias.to(dtype).float())
    everywhere = torch.tensor(0.5).expand(20, 1)
    assert_same_bits(cpu.mm(a, b, everywhere, column_scale, None, torch.float32), sums * (0.5 * column_scale))


def test_a_result_depends_on_its_own_row_and_column_only(threads):
    """So ranks and threads may split rows and columns as they like."""
    m, k, n = 300, 1100, 270
    a, b = draw_codes((m, k), E4M3), draw_codes((k, n), E5M2, seed=1)
    whole = cpu.mm(a, b, ONE, ONE, None, torch.float32)
    for start, stop in ((0, 1), (5, 22), (37, 300), (288, 300)):
        assert_same_bits(cpu.mm(a[start:stop], b, ONE, ONE, None, torch.float32), whole[start:stop])
        part = slice(start, min(stop, n))
        assert_same_bits(cpu.mm(a, b[:, part], ONE, ONE, None, torch.float32), whole[:, part])
    assert_same_bits(cpu.mm(a[:5], b[:, :6], ONE, ONE, None, torch.float32), whole[:5, :6])


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (0, 0, 7)], ids=str)
def test_empty_matrices_give_zeros_or_the_bias(shape):
    m, k, n = shape
    a, b, bias = draw_codes((m, k), E4M3), draw_codes((k, n), E4M3), torch.arange(1.0, n + 1)
    for out_dtype in OUT_DTYPES:
        assert_same_bits(cpu.mm(a, b, ONE, ONE, None, out_dtype), torch.zeros(m, n, dtype=out_dtype))
        assert_same_bits(cpu.mm(a, b, ONE, ONE, bias, out_dtype), bias.to(out_dtype).expand(m, n).contiguous())


def test_the_smallest_numbers_are_not_flushed():
    """The dot product takes subnormal operands and sums for 0; no code, product or sum is one."""
    for (a_dtype, a_least), (b_dtype, b_least) in itertools.product(((E4M3, 2.0**-9), (E5M2, 2.0**-16)), repeat=2):
        a = torch.zeros(40, 40, dtype=torch.uint8)
        a[range(40), range(40)] = 1
        b = torch.ones_like(a).view(b_dtype)
        out = cpu.mm(a.view(a_dtype), b, ONE, ONE, None, torch.float32)
        assert out.equal(torch.full((40, 40), a_least * b_least))


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_results_round_as_torch_rounds(out_dtype):
    """To even, with subnormals, to inf: for scales that give every size of result."""
    a, b = draw_codes((64, 3), E4M3), draw_codes((3, 48), E4M3, seed=1)
    sums = sum_by_slabs(a, b)
    for exponent in (*range(-149, -100, 4), -24, -14, -5, 0, 1, 100, 110, 120, 127):
        scale = torch.tensor(2.0**exponent)
        actual = cpu.mm(a, b, scale, ONE, None, out_dtype)
        assert_same_bits(actual, (sums * scale).to(out_dtype))
    ties = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [-1.0, -(2.0**-8)]]).to(E4M3)
    out = cpu.mm(ties, torch.ones(2, 40).to(E4M3), ONE, ONE, None, torch.bfloat16)
    assert out[:, 39].tolist() == [1.0, 1.015625, -1.0]


@pytest.mark.parametrize("layout", [Tensor.contiguous, to_column_major])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_nan_and_inf_codes_reach_the_result(layout, out_dtype):
    ones = torch.ones(50, 50)
    for dtype, code in ((E4M3, 0x7F), (E4M3, 0xFF), (E5M2, 0x7D), (E5M2, 0x7F), (E5M2, 0xFE)):
        a = ones.to(dtype)
        a.view(torch.uint8)[5, 49] = code
        for left, right in ((layout(a), ones.to(E4M3)), (ones.to(E4M3), layout(a))):
            out = cpu.mm(left, right, ONE, ONE, None, out_dtype)
            expected = sum_by_slabs(left, right)
            assert int(expected.isnan().sum()) == 50
            assert_same_bits(out, expected.to(out_dtype))
    infinite = ones.to(E5M2)
    infinite.view(torch.uint8)[5, 49], infinite.view(torch.uint8)[6, 3] = 0x7C, 0xFC
    b = ones.clone()
    b[49, 7] = 0
    out = cpu.mm(layout(infinite), b.to(E4M3), ONE, ONE, None, out_dtype)
    assert out[5, 7].isnan()
    assert out[5, :7].isposinf().all()
    assert out[6].isneginf().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_scales_that_are_not_finite_reach_their_rows_and_columns(bad):
    a, b = draw_codes((40, 30), E4M3), draw_codes((30, 50), E4M3, seed=1)
    a_scale, b_scale = torch.ones(40, 1), torch.ones(1, 50)
    a_scale[3], b_scale[0, 44] = bad, bad
    for out_dtype in OUT_DTYPES:
        out = cpu.mm(a, b, a_scale, b_scale, None, out_dtype)
        assert_same_bits(out, (sum_by_slabs(a, b) * (a_scale * b_scale)).to(out_dtype))
        assert not out[3].isfinite().any()
        assert not out[:, 44].isfinite().any()


@pytest.mark.parametrize("shape", [*SHAPES, (530, 1040, 700), (2, 5000, 900), (900, 3, 2)], ids=str)
def test_nothing_is_written_outside_of_the_result(shape):
    (m, k, n), margin = shape, 4096
    a, b = draw_codes((m, k), E4M3), draw_codes((k, n), E4M3, seed=1)
    sums = sum_by_slabs(a, b)
    for (kind, dtype), threads in itertools.product(enumerate((torch.float32, torch.bfloat16)), (1, 2, 5)):
        out = torch.full((m * n * dtype.itemsize + 2 * margin,), 0xA5, dtype=torch.uint8)
        a_arguments = a.data_ptr(), 0, *a.stride(), ONE.data_ptr(), 0
        b_arguments = b.data_ptr(), 0, b.stride(1), b.stride(0), ONE.data_ptr(), 0
        cpu.extension.mm(out.data_ptr() + margin, *a_arguments, *b_arguments, m, k, n, kind, 0, threads)
        assert (out[:margin] == 0xA5).all()
        assert (out[-margin:] == 0xA5).all()
        assert out[margin:-margin].view(dtype).view(m, n).equal(sums.to(dtype))


def test_a_bias_of_another_shape_is_refused():
    a, b = draw_codes((40, 30), E4M3), draw_codes((30, 50), E4M3)
    for bias in (torch.ones(1), torch.ones(40), torch.ones(1, 50)):
        with pytest.raises(ValueError, match=re.escape(f"expected a bias of [50], got {list(bias.shape)}")):
            cpu.mm(a, b, ONE, ONE, bias, torch.float32)


def test_operands_of_other_shapes_dtypes_and_devices_are_not_taken():
    a = draw_codes((40, 30), E4M3)
    assert cpu.mm(a, draw_codes((30, 5), E5M2), ONE, ONE, None, torch.float32) is not None
    of_another_format, on_meta = torch.zeros(30, 5).to(torch.float8_e4m3fnuz), draw_codes((30, 5), E5M2).to("meta")
    for b in (draw_codes((31, 5), E5M2), of_another_format, on_meta):
        assert cpu.mm(a, b, ONE, ONE, None, torch.float32) is None


def test_a_sum_of_a_million_numbers_is_as_exact_as_pytorchs():
    """A single chain of float32 additions loses 3e-4 here: each term is small relative to the sum."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=generator).to(E4M3) for shape in ((4, 1 << 20), (1 << 20, 32)))
    expected = a.double() @ b.double()
    error = (cpu.mm(a, b, ONE, ONE, None, torch.float32) - expected).abs().max() / expected.max()
    assert error <= max(2e-6, float((a.float() @ b.float() - expected).abs().max() / expected.max()))
