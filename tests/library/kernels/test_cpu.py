"""Compares the C extension with its oracle, scaling.py in plain PyTorch: every bit of codes and scales."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.widen import widen
from quaver.recipes import scaling
from quaver.recipes.scale_layout import ALL, BLOCK_SIZES, ScaleLayout, infer_layout
from tests.isolated import isolated
from tests.recipes import E4M3, E5M2
from tests.reference import assert_same_bits, every_value, reference_amax, reference_cast, reference_scales
from tests.steps import assert_same
from tests.thinned import thinned

HP_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT8_DTYPES = [E4M3, E5M2]
SHAPES = [(1, 1), (3, 5), (17, 33), (1, 1000), (1000, 1), (64, 128), (0, 4), (4, 0), (0, 0)]
LARGE = (517, 1031)  # enough elements for threads, and for the GIL to be released
INTS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NAN, INF = float("nan"), float("inf")
SCALES = [1.0, 2.0**20, 2.0**-9, 0.37, 448 / 3.3, 448e12, 57344e12, 1e-38, 1e-45, 3.4e38, 0.0, -1.5, INF, -INF, NAN]

pytestmark = pytest.mark.skipif(not cpu.HAS_EXTENSION, reason=f"the C extension is off: {cpu.UNAVAILABLE_REASON}")


def draw_bits(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every class of number: normals of all sizes, subnormals, zeros, inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
    hp = bits.to(torch.int32).to(INTS[dtype]).view(dtype)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-45, 1e-7]).to(dtype)
    chosen = torch.randint(0, 40, shape, generator=generator)
    return torch.where(chosen < len(special), special[chosen.clamp(max=len(special) - 1)], hp)


def draw_gaussian(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A different size in every row and column, and outliers."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    hp = torch.randn(shape, generator=generator) * 2 ** torch.linspace(-8, 8, rows)[:, None]
    hp = hp * 2 ** torch.linspace(-3, 3, columns)[None, :]
    hp[torch.rand(shape, generator=generator) < 0.01] *= 30
    return hp.to(dtype)


def list_numbers(dtype: torch.dtype) -> Tensor:
    """Every 16-bit number; for float32 random bits."""
    return draw_bits((512, 1024), dtype) if dtype is torch.float32 else every_value(dtype).view(256, 256)


@pytest.mark.parametrize(("dtype", "float8_dtype", "scale"), thinned(HP_DTYPES, FLOAT8_DTYPES, SCALES))
def test_every_number_is_cast_as_the_reference_casts_it(dtype, float8_dtype, scale):
    hp, quant_scale = list_numbers(dtype), torch.tensor(scale)
    actual, expected = (cast(hp, quant_scale, float8_dtype) for cast in (cpu.cast_with_scale, reference_cast))
    assert_same_bits(actual, expected)
    keeps_sign = ~hp.isinf()
    assert_same_bits(actual[keeps_sign], expected[keeps_sign], nan_bits=scale == scale)


def test_blocks_of_whole_rows_are_of_any_width():
    hp = draw_gaussian((130, 4101), torch.float32)
    quant_scale = torch.tensor([[2.0], [0.25]])
    expected = reference_cast(hp, quant_scale.repeat_interleave(128, 0)[:130], E4M3)
    layout = ScaleLayout(128, ALL)
    assert_same_bits(cpu.cast_with_scale(hp, quant_scale, E4M3, layout), expected)
    wide = cpu.widen(expected, torch.float32, quant_scale, layout)
    assert torch.equal(wide, scaling.dequantize(expected, quant_scale, layout=layout))


@pytest.mark.parametrize("float8_dtype", FLOAT8_DTYPES)
def test_ties_round_to_even_and_their_neighbours_away(float8_dtype):
    values = torch.arange(256, dtype=torch.uint8).view(float8_dtype).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    around = torch.stack([ties.nextafter(torch.tensor(-INF)), ties, ties.nextafter(torch.tensor(INF))])
    actual = cpu.cast_with_scale(around, torch.tensor(1.0), float8_dtype)
    assert_same_bits(actual, reference_cast(around, torch.tensor(1.0), float8_dtype))
    assert torch.equal(actual[0].float(), values[:-1])
    assert torch.equal(actual[2].float(), values[1:])
    assert (actual[1].view(torch.uint8) % 2 == 0).all()


@pytest.mark.parametrize(("shape", "dtype", "float8_dtype"), thinned([*SHAPES, LARGE], HP_DTYPES, FLOAT8_DTYPES))
def test_scales_of_each_shape_are_applied(shape, dtype, float8_dtype):
    hp = draw_gaussian(shape, dtype)
    for scale_shape in ((), (shape[0], 1), (1, shape[1])):
        quant_scale = torch.rand(scale_shape) * 100
        actual = cpu.cast_with_scale(hp, quant_scale, float8_dtype)
        assert_same_bits(actual, reference_cast(hp, quant_scale, float8_dtype))


@pytest.mark.parametrize(
    ("dtype", "float8_dtype", "dims", "power_of_2", "threads"),
    thinned(HP_DTYPES, FLOAT8_DTYPES, ([None], [0], [1], [1, 0]), (False, True), (1, 3)),
    indirect=["threads"],
)
def test_dynamic_casts_have_the_bits_of_the_reference(dtype, float8_dtype, dims, power_of_2, threads):
    """Casts the matrix, its rows or its columns; both axes in two reads."""
    inputs = [draw(shape, dtype) for shape in [*SHAPES, LARGE] for draw in (draw_gaussian, draw_bits)]
    for hp in (*inputs, torch.zeros(3, 5, dtype=dtype), list_numbers(dtype).reshape(-1, 1)):
        read_before = cpu.count_elements_read()
        if len(dims) == 1:
            casts = cpu.dynamic_cast(hp, float8_dtype, *dims, power_of_2=power_of_2)
        else:
            casts = cpu.dynamic_cast_both_dims(hp, float8_dtype, power_of_2=power_of_2)
            assert cpu.count_elements_read() - read_before == 2 * hp.numel()
        for dim, cast in zip(dims, (casts[:3], casts[3:]), strict=False):
            scales = reference_scales(reference_amax(hp, dim), float8_dtype, power_of_2=power_of_2)
            assert_same(cast, (reference_cast(hp, scales[0], float8_dtype), *scales))


LAYOUTS = [ScaleLayout(*size) for size in (*BLOCK_SIZES, (128, 1), (32, 1))]


@pytest.mark.parametrize(("dtype", "layout", "threads"), thinned(HP_DTYPES, LAYOUTS, (1, 3)), indirect=["threads"])
def test_blocks_have_the_bits_of_pytorch(dtype, layout, threads):
    """Compares amaxes, codes and widened values; runs of columns end between blocks, within one and at the last."""
    for shape in [*SHAPES, LARGE, (130, 2048), (33, 2100), (2, 4101)]:
        for hp in (draw_gaussian(shape, dtype), draw_bits(shape, dtype)):
            amax = scaling.compute_block_amax(hp, layout)
            assert_same_bits(cpu.compute_block_amax(hp, layout), amax)
            quant, dequant, _ = scaling.compute_scales(amax, E4M3, True, is_blockwise=True)
            codes = scaling.cast_blocks(hp, quant, E4M3, layout)
            assert_same_bits(cpu.cast_with_scale(hp, quant, E4M3, layout), codes)
            for wide in (torch.bfloat16, torch.float32):
                expected = scaling.multiply_scale_(codes.to(wide), dequant.to(wide), layout)
                assert_same_bits(widen(codes, wide, dequant, layout), expected)


def test_products_that_are_subnormal_are_not_truncated():
    codes = torch.arange(120, dtype=torch.uint8).view(E4M3).repeat(64, 2)
    with_nan = torch.tensor([2.0**-127, float("nan")]).repeat(64, 1)
    for scale in (with_nan, torch.full((2, 240), 2.0**-120), torch.full((2, 2), 2.0**-126)):
        expected = scaling.multiply_scale_(codes.to(torch.bfloat16), scale.to(torch.bfloat16))
        assert_same_bits(widen(codes, torch.bfloat16, scale, infer_layout(scale, codes.shape)), expected)


@pytest.fixture
def compare_without_avx512():
    """Return a function that calls another with and without the vectors of lookup.h, and compares the bits."""
    before = cpu.use_avx512(enabled=True)
    if not cpu.use_avx512(enabled=True):
        cpu.use_avx512(enabled=before)
        pytest.skip("this CPU has no AVX-512 VBMI, so all other tests are of the portable code")

    def compare(function, *args):
        with_vectors = function(*args)
        assert cpu.use_avx512(enabled=False)
        without = function(*args)
        assert not cpu.use_avx512(enabled=True)
        assert_same(with_vectors, without)

    yield compare
    cpu.use_avx512(enabled=before)


@pytest.mark.parametrize("float8_dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (70, 191), (256, 256), (1, 63)])
def test_widening_has_the_same_bits_without_avx512(compare_without_avx512, shape, float8_dtype):
    rows, columns = shape
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[0] = torch.arange(columns) % 120  # a row without NaN: most blocks
    scale = torch.rand(1, columns)
    for matrix in (codes.view(float8_dtype), (codes % 120).view(float8_dtype)):
        compare_without_avx512(cpu.widen, matrix, torch.bfloat16)
        compare_without_avx512(cpu.widen, matrix, torch.float32, scale)
        for scale_shape in ((), (rows, 1), (1, columns)):
            scales = [2.0 ** torch.randint(*span, scale_shape) for span in ((-100, 101), (-110, 120), (0, 1))]
            for scale in (*scales, *(torch.full(scale_shape, value) for value in (0.0, INF, NAN, 2.0**127))):
                compare_without_avx512(cpu.widen, matrix, torch.bfloat16, scale)


@pytest.mark.parametrize(("float8_dtype", "dtype"), thinned(FLOAT8_DTYPES, (torch.bfloat16, torch.float32)))
def test_widened_values_are_codes_times_scales(float8_dtype, dtype):
    every_code, scales = torch.arange(256, dtype=torch.uint8).repeat(3, 1), 2.0 ** torch.arange(-55, 56)
    cases = [(every_code, scale) for scale in (*scales, *torch.tensor([0.0, INF, NAN, 2.0**119, 2.0**-110]))]
    for rows, columns in [*SHAPES, LARGE]:
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        cases += [(codes, 2.0 ** torch.randint(-40, 40, shape)) for shape in ((), (rows, 1), (1, columns))]
        cases += [(codes, torch.rand(rows, 1))] if dtype is torch.float32 else []
    for codes, scale in cases:
        codes = codes.view(float8_dtype)
        assert_same_bits(cpu.widen(codes, dtype), codes.to(dtype))
        assert_same_bits(cpu.widen(codes, dtype, scale), codes.to(dtype) * scale.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_some_columns_are_widened_in_either_layout(dtype, threads):
    whole = torch.randint(0, 256, (400, 900), dtype=torch.uint8).view(E4M3)
    for start, stop in ((0, 512), (7, 500), (3, 4), (5, 5)):
        codes = whole[:, start:stop]
        for shape in ((1, stop - start), (400, 1)):
            scale = 2.0 ** torch.randint(-40, 40, shape)
            expected = codes.to(dtype) * scale.to(dtype)
            layout = infer_layout(scale, codes.shape)
            assert_same_bits(widen(codes, dtype, scale, layout), expected)
            assert_same_bits(widen(codes.t(), dtype, scale.t(), layout.t()).t(), expected)


def test_the_extension_takes_dense_rows_only():
    hp = torch.randn(4, 6)
    codes = hp.to(E4M3)
    assert cpu.supports(hp, E5M2)
    assert cpu.supports(torch.nn.Parameter(hp), E4M3)
    assert cpu.supports(codes, torch.bfloat16)
    assert cpu.supports(codes[:, 1:3], torch.bfloat16)
    with torch.inference_mode():
        assert cpu.supports(torch.randn(4, 6), E4M3)
    for matrix in (codes.t(), codes[:, ::2], codes[:1].expand(4, 6), codes[0]):
        assert not cpu.supports(matrix, torch.bfloat16)
    for matrix in (hp.double(), hp.t(), hp[:, 1:3], hp[0], hp.to("meta")):
        assert not cpu.supports(matrix, E4M3)
    assert not cpu.supports(hp, torch.float8_e4m3fnuz)
    assert not cpu.supports(codes, torch.float16)
    assert not cpu.supports(hp, torch.bfloat16)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads /proc/cpuinfo")
def test_the_matmul_runs_where_the_cpu_has_bfloat16_vectors_and_no_tiles():
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    vectors = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"} <= flags
    assert (vectors and "amx_bf16" not in flags) == cpu.HAS_MM


def _reload(value: str, available: bool) -> None:
    os.environ["QUAVER_PURE_PYTORCH"] = value
    importlib.reload(cpu)
    assert cpu.HAS_EXTENSION is cpu.supports(torch.ones(2, 2), E4M3) is available
    assert ("QUAVER_PURE_PYTORCH is set" in str(cpu.UNAVAILABLE_REASON)) is (value == "1")


@pytest.mark.parametrize(("value", "available"), [("1", False), ("0", cpu.HAS_EXTENSION)])
def test_an_environment_variable_turns_the_extension_off(value, available):
    isolated(_reload, value, available)
