"""The float8 matmuls in C: to the bit a loop over k that rounds to float32 at each step; and against float64."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quaver.kernels import cpu, cpu_mm
from quaver.kernels.exact_mm import exact_float8_mm
from tests.reference import assert_matmul_exact, ulp
from tests.unit.test_cpu import assert_same_bits, gaussian, needs_extension

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
DEPTH = 2048  # numbers of a sum that are added before it goes through memory (quaver/csrc/matmul.h)
SHAPES = [
    (1, 1, 1),
    (16, 16, 32),
    (17, 33, 15),
    (9, 34, 47),
    (100, DEPTH + 1, 70),
    (70, 2 * DEPTH, 301),
    (301, 2 * DEPTH + 30, 66),
    (3, 2000, 5),
    (700, 1040, 530),  # more than a panel of the smaller operand
]
NAN, INF = float("nan"), float("inf")

needs_mm = pytest.mark.skipif(not cpu_mm.HAS_MM, reason="quaver's matmul does not run on this CPU")


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu_mm, "_THREADS_PAY_FROM", 1)
    yield request.param
    torch.set_num_threads(before)


def codes(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every finite number of a format, subnormals and both zeros included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    values = bits.view(dtype).float()
    return torch.where(values.isfinite(), bits, torch.zeros((), dtype=torch.uint8)).view(dtype)


def sums_by_ascending_k(a: Tensor, b: Tensor) -> Tensor:
    """Products of float8 numbers are exact in float32, so each step rounds once."""
    left, right = a.float().t().contiguous(), b.float()
    sums = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        sums += left[k].unsqueeze(1) * right[k]
    return sums


def by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def every_other(matrix: Tensor) -> Tensor:
    """The same numbers, neither rows nor columns contiguous."""
    rows, columns = matrix.shape
    wide = torch.full((2 * rows + 1, 2 * columns + 1), 0x7F, dtype=torch.uint8)
    wide[: 2 * rows : 2, : 2 * columns : 2] = matrix.view(torch.uint8)
    return wide.view(matrix.dtype)[: 2 * rows : 2, : 2 * columns : 2]


def part_of_wider(matrix: Tensor) -> Tensor:
    """The same numbers, with NaNs around them in memory."""
    rows, columns = matrix.shape
    wide = torch.full((rows + 2, columns + 3), 0x7F, dtype=torch.uint8)
    wide[1:-1, 1:-2] = matrix.view(torch.uint8)
    return wide.view(matrix.dtype)[1:-1, 1:-2]


def part_of_taller(matrix: Tensor) -> Tensor:
    return part_of_wider(matrix.t()).t()


# ---- every size ----------------------------------------------------------------------------------------------------


@needs_mm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "_".join(str(each)[13:] for each in formats))
def test_every_element_is_the_sum_by_ascending_k_scaled_once_and_rounded_once(shape, formats, threads):
    m, k, n = shape
    a, b = codes((m, k), formats[0]), codes((k, n), formats[1], seed=1)
    sums = sums_by_ascending_k(a, b)
    row_scale, column_scale = torch.rand(m, 1) + 0.1, (torch.rand(1, n) + 0.1) * 2**-20
    one, other = torch.tensor(0.37), torch.tensor(2.0**-18)
    bias = torch.randn(n)
    for layout_a, layout_b in itertools.product((Tensor.contiguous, by_columns), repeat=2):
        for a_scale, b_scale in itertools.product((one, row_scale), (other, column_scale)):
            for out_dtype in OUT_DTYPES:
                scaled = sums * (a_scale * b_scale)
                actual = cpu_mm.mm(layout_a(a), layout_b(b), a_scale, b_scale, None, out_dtype)
                assert_same_bits(actual, scaled.to(out_dtype))
        actual = cpu_mm.mm(layout_a(a), layout_b(b), row_scale, column_scale, bias, torch.bfloat16)
        assert_same_bits(actual, (sums * (row_scale * column_scale) + bias).bfloat16())


@needs_mm
@pytest.mark.parametrize("layout", [every_other, part_of_wider, part_of_taller, by_columns])
@pytest.mark.parametrize("shape", [(33, 70, 50), (1, 64, 100), (65, 1, 40), (50, 65, 1), (1, 1, 1)], ids=str)
def test_any_strides(layout, shape):
    m, k, n = shape
    a, b, one = codes((m, k), E4M3), codes((k, n), E5M2, seed=1), torch.tensor(1.0)
    expected = cpu_mm.mm(a, b, one, one, None, torch.float32)
    assert_same_bits(expected, sums_by_ascending_k(a, b))
    assert_same_bits(cpu_mm.mm(layout(a), b, one, one, None, torch.float32), expected)
    assert_same_bits(cpu_mm.mm(a, layout(b), one, one, None, torch.float32), expected)


@needs_mm
def test_scales_of_any_strides_and_biases_of_any_dtype():
    a, b = codes((20, 40), E4M3), codes((40, 30), E4M3, seed=1)
    row_scale, column_scale, bias = torch.rand(20, 3)[:, 1:2], torch.rand(60, 1)[::2].t(), torch.randn(60)[::2]
    sums = sums_by_ascending_k(a, b)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        actual = cpu_mm.mm(a, b, row_scale, column_scale, bias.to(dtype), torch.float32)
        assert_same_bits(actual, sums * (row_scale * column_scale) + bias.to(dtype).float())
    everywhere = torch.tensor(0.5).expand(20, 1)
    assert_same_bits(cpu_mm.mm(a, b, everywhere, column_scale, None, torch.float32), sums * (0.5 * column_scale))


@needs_mm
def test_a_result_depends_on_its_own_row_and_column_only(threads):
    """So ranks and threads may split rows and columns as they like."""
    m, k, n = 300, 1100, 270
    a, b, one = codes((m, k), E4M3), codes((k, n), E5M2, seed=1), torch.tensor(1.0)
    whole = cpu_mm.mm(a, b, one, one, None, torch.float32)
    for start, stop in ((0, 1), (5, 22), (37, 300), (288, 300)):
        assert_same_bits(cpu_mm.mm(a[start:stop], b, one, one, None, torch.float32), whole[start:stop])
        part = slice(start, min(stop, n))
        assert_same_bits(cpu_mm.mm(a, b[:, part], one, one, None, torch.float32), whole[:, part])
    small = cpu_mm.small_mm(a[:5], b[:, :6], one, one, torch.float32)
    assert_same_bits(small, whole[:5, :6])


@needs_mm
@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (0, 0, 7)], ids=str)
def test_empty_matrices(shape):
    m, k, n = shape
    a, b, one, bias = codes((m, k), E4M3), codes((k, n), E4M3), torch.tensor(1.0), torch.arange(1.0, n + 1)
    for out_dtype in OUT_DTYPES:
        assert_same_bits(cpu_mm.mm(a, b, one, one, None, out_dtype), torch.zeros(m, n, dtype=out_dtype))
        assert_same_bits(cpu_mm.mm(a, b, one, one, bias, out_dtype), bias.to(out_dtype).expand(m, n).contiguous())


# ---- accuracy ------------------------------------------------------------------------------------------------------


@needs_mm
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("dim_a", "dim_b"), [(None, None), (None, 0), (1, None), (1, 0)])
def test_against_float64_and_against_the_library(dim_a, dim_b, power_of_2, out_dtype, monkeypatch):
    """Rows and columns of sizes from 2^-8 to 2^8, with outliers.

    Both matmuls are within a unit in the last place of float64, plus what K roundings of sums in float32 can do. So
    they differ by two such units at most, plus twice that.
    """
    a, _, a_scale = cpu.dynamic_cast(gaussian((130, 700), torch.float32), E4M3, dim_a, power_of_2=power_of_2)
    b, _, b_scale = cpu.dynamic_cast(gaussian((700, 90), torch.float32, seed=1), E5M2, dim_b, power_of_2=power_of_2)
    b_scale = b_scale * 2.0**-20  # for float16's range
    own = cpu_mm.mm(a, b, a_scale, b_scale, None, out_dtype)
    assert_matmul_exact(own, a, b, a_scale, b_scale)
    monkeypatch.setattr(cpu_mm, "HAS_MM", False)
    library = exact_float8_mm(a, b, a_scale, b_scale, None, out_dtype, power_of_2)
    a64, b64 = a.double() * a_scale.double(), b.double() * b_scale.double()
    accumulated = a.shape[1] * 2.0**-24 * (a64.abs() @ b64.abs())
    bound = 2 * accumulated + 2 * ulp(a64 @ b64, out_dtype)
    assert ((own.double() - library.double()).abs() <= bound).all()


@needs_mm
def test_the_smallest_numbers_are_not_flushed():
    """The dot product takes subnormal operands and sums for 0; no code, product or sum is one."""
    one = torch.tensor(1.0)
    for (a_dtype, a_least), (b_dtype, b_least) in itertools.product(((E4M3, 2.0**-9), (E5M2, 2.0**-16)), repeat=2):
        a = torch.zeros(40, 40, dtype=torch.uint8)
        a[range(40), range(40)] = 1
        out = cpu_mm.mm(
            a.view(a_dtype), torch.ones(40, 40, dtype=torch.uint8).view(b_dtype), one, one, None, torch.float32
        )
        assert out.equal(torch.full((40, 40), a_least * b_least))


@needs_mm
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_results_round_as_torch_rounds(out_dtype):
    """To even, with subnormals, to inf: for scales that give every size of result."""
    a = codes((64, 3), E4M3)
    b = codes((3, 48), E4M3, seed=1)
    sums = sums_by_ascending_k(a, b)
    for exponent in (*range(-149, -100, 4), -24, -14, -5, 0, 1, 100, 110, 120, 127):
        scale = torch.tensor(2.0**exponent)
        actual = cpu_mm.mm(a, b, scale, torch.tensor(1.0), None, out_dtype)
        assert_same_bits(actual, (sums * scale).to(out_dtype))
    ties = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [-1.0, -(2.0**-8)]]).to(E4M3)
    out = cpu_mm.mm(ties, torch.ones(2, 40).to(E4M3), torch.tensor(1.0), torch.tensor(1.0), None, torch.bfloat16)
    assert out[:, 39].tolist() == [1.0, 1.015625, -1.0]


# ---- what is not a number ------------------------------------------------------------------------------------------


@needs_mm
@pytest.mark.parametrize("layout", [Tensor.contiguous, by_columns])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_what_is_not_a_number_stays_so(layout, out_dtype):
    one = torch.tensor(1.0)
    ones = torch.ones(50, 50)
    for dtype, code in ((E4M3, 0x7F), (E4M3, 0xFF), (E5M2, 0x7D), (E5M2, 0x7F), (E5M2, 0xFE)):
        a = ones.to(dtype)
        a.view(torch.uint8)[5, 49] = code
        for left, right in ((layout(a), ones.to(E4M3)), (ones.to(E4M3), layout(a))):
            out = cpu_mm.mm(left, right, one, one, None, out_dtype)
            expected = sums_by_ascending_k(left, right)
            assert int(expected.isnan().sum()) == 50
            assert_same_bits(out, expected.to(out_dtype))
    infinite = ones.to(E5M2)
    infinite.view(torch.uint8)[5, 49], infinite.view(torch.uint8)[6, 3] = 0x7C, 0xFC
    b = ones.clone()
    b[49, 7] = 0
    out = cpu_mm.mm(layout(infinite), b.to(E4M3), one, one, None, out_dtype)
    assert out[5, 7].isnan()
    assert out[5, :7].isposinf().all()
    assert out[6].isneginf().all()


@needs_mm
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_scales_that_are_not_numbers_reach_their_rows_and_columns(bad):
    a, b = codes((40, 30), E4M3), codes((30, 50), E4M3, seed=1)
    a_scale, b_scale = torch.ones(40, 1), torch.ones(1, 50)
    a_scale[3], b_scale[0, 44] = bad, bad
    for out_dtype in OUT_DTYPES:
        out = cpu_mm.mm(a, b, a_scale, b_scale, None, out_dtype)
        assert_same_bits(out, (sums_by_ascending_k(a, b) * (a_scale * b_scale)).to(out_dtype))
        assert not out[3].isfinite().any()
        assert not out[:, 44].isfinite().any()


# ---- memory, and where it runs -------------------------------------------------------------------------------------


@needs_mm
@pytest.mark.parametrize("shape", [*SHAPES, (530, 1040, 700), (2, 5000, 900), (900, 3, 2)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_nothing_is_written_outside_of_the_room_and_the_result(shape, threads):
    m, k, n = shape
    a, b, one = codes((m, k), E4M3), codes((k, n), E4M3, seed=1), torch.tensor(1.0)
    margin = 4096
    for layout_a, layout_b in itertools.product((Tensor.contiguous, by_columns), repeat=2):
        left, right = layout_a(a), layout_b(b)
        bytes_of_room = cpu.extension.mm_room(m, k, n, threads)
        room = torch.full((bytes_of_room + 2 * margin,), 0xA5, dtype=torch.uint8)
        out = torch.full((m * n * 2 + 2 * margin,), 0xA5, dtype=torch.uint8)
        of_a = left.data_ptr(), 0, *left.stride(), one.data_ptr(), 0
        of_b = right.data_ptr(), 0, right.stride(1), right.stride(0), one.data_ptr(), 0
        cpu.extension.mm(out.data_ptr() + margin, *of_a, *of_b, m, k, n, 1, 0, threads, room.data_ptr() + margin)
        for memory in (room, out):
            assert (memory[:margin] == 0xA5).all()
            assert (memory[-margin:] == 0xA5).all()
        assert out[margin:-margin].view(torch.bfloat16).view(m, n).equal(sums_by_ascending_k(a, b).bfloat16())


@needs_mm
def test_it_packs_into_less_memory_than_a_library_needs_for_widened_operands():
    for m, k, n in ((1024, 1024, 1024), (2048, 256, 896), (4096, 4096, 4096), (1024, 1024, 4096)):
        assert cpu.extension.mm_room(m, k, n, 1) < 2 * k * (min(m, n) + min(max(m, n), 1024))


@needs_mm
def test_a_bias_of_another_shape_is_refused():
    a, b, one = codes((40, 30), E4M3), codes((30, 50), E4M3), torch.tensor(1.0)
    for bias in (torch.ones(1), torch.ones(40), torch.ones(1, 50)):
        with pytest.raises(ValueError, match=re.escape(f"expected a bias of [50], got {list(bias.shape)}")):
            cpu_mm.mm(a, b, one, one, bias, torch.float32)


@needs_mm
def test_what_it_takes():
    a = codes((40, 30), E4M3)
    assert cpu_mm.takes_mm(a, codes((30, 5), E5M2))
    assert not cpu_mm.takes_mm(a, codes((31, 5), E5M2))
    assert not cpu_mm.takes_mm(a, torch.zeros(30, 5).to(torch.float8_e4m3fnuz))
    assert not cpu_mm.takes_mm(a.to("meta"), codes((30, 5), E5M2))


@needs_extension
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux")
def test_it_runs_where_the_cpu_has_bfloat16_vectors_and_no_tiles():
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    vectors = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"} <= flags
    assert (vectors and "amx_bf16" not in flags) == cpu_mm.HAS_MM


def test_without_the_extension_a_library_multiplies():
    script = (
        "import torch; from quaver.kernels import cpu_mm; from quaver.kernels.exact_mm import exact_float8_mm; "
        "a = torch.ones(64, 64).to(torch.float8_e4m3fn); one = torch.tensor(1.0); "
        "print(cpu_mm.HAS_MM, exact_float8_mm(a, a, one, one, None, torch.bfloat16, False).unique().tolist())"
    )
    environment = {**os.environ, "QUAVER_PURE_PYTORCH": "1"}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout == "False [64.0]\n"


# ---- small ones ----------------------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 1, 1), (3, 17, 5), (64, 8, 33), (1, 200, 1)])
def test_small_matmuls_are_exact(
    shape: tuple[int, int, int], a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    m, k, n = shape
    for dim_a, dim_b in itertools.product((None, 1), (None, 0)):
        a, _, a_scale = cpu.dynamic_cast(gaussian((m, k), torch.float32), a_dtype, dim_a)
        b, _, b_scale = cpu.dynamic_cast(gaussian((k, n), torch.float32, seed=1), b_dtype, dim_b)
        expected = cpu_mm.small_mm(a, b, a_scale, b_scale, out_dtype)
        assert_matmul_exact(expected, a, b, a_scale, b_scale)
        by_columns = a.t().contiguous().t(), b.t().contiguous().t()
        assert_same_bits(cpu_mm.small_mm(*by_columns, a_scale, b_scale, out_dtype), expected)


@needs_extension
def test_small_matmuls_keep_what_is_not_a_number() -> None:
    a = torch.ones(4, 4).to(E4M3)
    a.view(torch.uint8)[2, 1] = 0x7F
    one = torch.tensor(1.0)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = cpu_mm.small_mm(a, torch.ones(4, 4).to(E4M3), one, one, out_dtype)
        assert out[2].isnan().all()
        assert out[[0, 1, 3]].equal(torch.full((3, 4), 4.0, dtype=out_dtype))
        infinite = cpu_mm.small_mm(a[:2], torch.ones(4, 4).to(E4M3), torch.tensor(math.inf), one, out_dtype)
        assert infinite.isposinf().all()


@needs_extension
def test_which_matmuls_are_small() -> None:
    a, b = torch.zeros(32, 32).to(E4M3), torch.zeros(32, 32).to(E4M3)
    assert cpu_mm.takes_small_mm(a, b, torch.bfloat16)
    assert not cpu_mm.takes_small_mm(a, b, torch.float16)
    assert not cpu_mm.takes_small_mm(a, torch.zeros(32, 33).to(E4M3), torch.bfloat16)
    assert not cpu_mm.takes_small_mm(a, torch.zeros(32, 32).to(torch.float8_e4m3fnuz), torch.bfloat16)
