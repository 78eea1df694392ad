"""Casts into both layouts on a GPU: the oracle's bits; column sums; no synchronisation; in a CUDA graph; compiled."""

import math

import pytest
import torch

pytest.importorskip("triton")

from quaver import scaling
from quaver.kernels import layouts, triton_blocks, triton_rows
from tests.triton_kernels import E4M3, E5M2, assert_same_bits, every_value
from tests.unit.test_triton_layouts import (
    WANTED,
    assert_axes,
    assert_given,
    assert_kept,
    assert_layouts,
    assert_sums,
    varied,
)

pytestmark = pytest.mark.gpu
FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _needs_a_gpu_that_rounds_once():
    if not triton_blocks.takes(torch.ones(1, device="cuda"), E4M3):
        pytest.skip("needs a GPU that converts to float8 in one rounding")


@FLOAT8
@HP
def test_every_value(hp_dtype, float8_dtype):
    hp = every_value(hp_dtype).view(256, 256).cuda()
    for scale in (0.0, 1.0, 0.37, 2.0**20, 448e12, 1e-30, 3e38, 1e-42, INF, NAN, -1.0):
        assert_kept(hp, scale, float8_dtype)
        assert_given(hp, float8_dtype, torch.tensor(scale), torch.tensor(scale))
    for power_of_2 in (False, True):
        assert_axes(hp, float8_dtype, power_of_2=power_of_2)
        assert_axes(hp.t().contiguous(), float8_dtype, power_of_2=power_of_2)
        assert_layouts(hp[hp.isfinite().all(1)], float8_dtype, power_of_2=power_of_2)


@FLOAT8
@HP
def test_unusual_amaxes(hp_dtype, float8_dtype):
    for values in ([0.0, -0.0], [1e-20, 0.0], [1e-40, 0.0], [1.0, NAN], [1.0, INF], [-INF, NAN], [3e4, -6e4]):
        for repeats in ((2, 1), (128, 64)):
            hp = torch.tensor(values).repeat(*repeats).to("cuda", hp_dtype)
            for power_of_2 in (False, True):
                assert_layouts(hp, float8_dtype, power_of_2=power_of_2, sums=True)
                assert_axes(hp, float8_dtype, power_of_2=power_of_2, sums=True)
            for scale in (0.0, -3.0, NAN):
                assert_kept(hp, scale, float8_dtype, sums=True)


@HP
def test_shapes(hp_dtype):
    shapes = [
        (1, 1),
        (1, 40),
        (33, 1),
        (3, 5),
        (127, 129),
        (128, 64),
        (144, 80),
        (2000, 1008),
        (1000, 4100),
        (0, 4),
        (4, 0),
    ]
    for shape in shapes:
        hp = varied(*shape, hp_dtype) if min(shape) else torch.zeros(shape, dtype=hp_dtype)
        hp = hp.cuda()
        for sums in (False, True):
            assert_layouts(hp, E5M2, sums=sums)
            assert_kept(hp, 100.0, E4M3, sums=sums)
            assert_axes(hp, E4M3, power_of_2=True, sums=sums)
        assert_given(hp, E4M3, torch.rand(shape[0], 1) * 9, torch.rand(1, shape[1]) * 9)
        assert_given(hp, E4M3, None, torch.tensor(0.7))
    off_16_bytes = varied(129, 64, hp_dtype).cuda().view(-1)[1 : 1 + 128 * 64].view(128, 64)
    assert_layouts(off_16_bytes, E4M3)
    assert_axes(off_16_bytes, E4M3)


def test_rows_of_every_width():
    for width in (7, 100, 4096, 5000, triton_rows.WIDEST, triton_rows.WIDEST + 16, 50_001):
        for sums in (False, True):
            assert_axes(varied(40, width, torch.bfloat16).cuda(), E4M3, wanted=WANTED[1:2], sums=sums)


def test_strides_do_not_matter():
    hp = varied(96, 80, torch.bfloat16).cuda()
    assert_layouts(hp.t(), E4M3)
    assert_axes(hp[:, ::2], E4M3)
    assert_layouts(hp[:1, :1].expand(64, 48), E4M3)


@FLOAT8
def test_turned_codes_are_not_corrupted(float8_dtype):
    """triton-lang/triton#11111: for some tiles, bytes of a transposed store came out as infinities and NaNs."""
    for rows, columns in ((128, 64), (256, 1024), (1024, 96), (4096, 4096)):
        hp = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            made = layouts.cast_layouts(hp, float8_dtype, rows=True, columns=True)
            assert made.column_codes.float().isfinite().all()
            assert made.column_codes.view(torch.uint8).equal(made.row_codes.view(torch.uint8))


def test_column_sums_are_the_same_in_every_run():
    hp = torch.randn(5000, 1040, device="cuda", dtype=torch.bfloat16)
    for cast, wanted in (
        (layouts.cast_layouts, WANTED[0]),
        (layouts.cast_axes, WANTED[0]),
        (layouts.cast_axes, WANTED[1]),
    ):
        runs = [cast(hp, E5M2, rows=wanted[0], columns=wanted[1], column_sums=True).column_sums for _ in range(5)]
        assert all(run.equal(runs[0]) for run in runs)
        assert_sums(runs[0], hp)


def test_more_than_2_to_the_31_elements():
    rows, columns = 2**17 + 16, 2**14
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs 22 GB of free GPU memory")
    hp = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    hp[-1, -9:] = torch.arange(-4.0, 5.0)
    hp[2**17 - 1, -1] = -3.5
    made = layouts.cast_layouts(hp, E4M3, rows=True, columns=True)
    axes = layouts.cast_axes(hp, E4M3, rows=True, columns=True)
    assert made.quant_scale.item() == 112.0
    for row, column in ((rows - 1, columns - 1), (rows - 1, columns - 9), (2**17 - 1, columns - 1)):
        expected = torch.tensor(hp[row, column].item() * 112.0).to(E4M3).item()
        assert made.row_codes[row, column].item() == made.column_codes[row, column].item() == expected
    assert axes.rows.codes[2**17 - 1, -1].item() == -448.0
    assert axes.columns.codes[rows - 1, columns - 9].item() == -448.0
    for codes in (made.row_codes, made.column_codes.t(), axes.rows.codes, axes.columns.codes.t()):
        assert codes.view(torch.uint8).count_nonzero() == 9


def every_cast(hp, quant_scale):
    """All that the casts return, of both layouts."""
    kept, seen = layouts.cast_with_persistent_scale(hp, quant_scale, E4M3, rows=True, columns=True, column_sums=True)
    axes = layouts.cast_axes(hp, E4M3, rows=True, columns=True, power_of_2=True, column_sums=True)
    of_rows = layouts.cast_axes(hp, E4M3, rows=True, columns=False, column_sums=True)
    return [
        *layouts.cast_layouts(hp, E5M2, rows=True, columns=True)[:4],
        *kept,
        seen,
        *axes.rows,
        *axes.columns,
        axes.column_sums,
        *of_rows.rows,
        of_rows.column_sums,
        *layouts.cast_with_scales(hp, E4M3, row_scale=axes.rows.quant_scale, column_scale=kept.quant_scale),
    ]


def expected_of_every_cast(hp, scale):
    """The same from the oracle; None for sums, which are rounded in another order."""
    hp = hp.cpu()
    codes, *scales = scaling.dynamic_cast(hp, E5M2)
    kept_codes, *kept, seen = scaling.cast_with_persistent_scale(hp, torch.tensor(scale), E4M3)
    rows = scaling.dynamic_cast(hp, E4M3, 1, power_of_2=True)
    given = scaling.cast_to_float8(hp, kept[0], E4M3)
    made = [codes, codes, *scales, kept_codes, kept_codes, *kept, None, seen, *rows]
    made += [*scaling.dynamic_cast(hp, E4M3, 0, power_of_2=True), None, *scaling.dynamic_cast(hp, E4M3, 1), None]
    return [*made, rows[0], given]


def assert_every_cast(made, hp, scale):
    for got, expected in zip(made, expected_of_every_cast(hp, scale), strict=True):
        if expected is None:
            assert_sums(got, hp)
        else:
            assert_same_bits(got, expected)


def test_no_synchronisation():
    hp = torch.randn(1000, 1040, device="cuda", dtype=torch.bfloat16)
    quant_scale = torch.full((), 100.0, device="cuda")
    every_cast(hp, quant_scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_cast(hp, quant_scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_the_scale_and_the_data():
    hp, quant_scale = torch.randn(304, 144, device="cuda"), torch.zeros((), device="cuda")
    every_cast(hp, quant_scale)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = every_cast(hp, quant_scale)
    for scale, magnitude in ((0.0, 1.0), (100.0, 3.0), (0.0, 0.1), (20.0, 50.0)):
        quant_scale.fill_(scale)
        hp.normal_(0, magnitude)
        graph.replay()
        assert_every_cast(made, hp, scale)


def test_compiled_code_is_eager_code():
    hp, quant_scale = torch.randn(304, 144, device="cuda", dtype=torch.bfloat16), torch.full((), 20.0, device="cuda")
    made = torch.compile(every_cast, fullgraph=True)(hp, quant_scale)
    assert_every_cast(made, hp, 20.0)
