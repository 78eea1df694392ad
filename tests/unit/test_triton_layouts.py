"""Casts into both layouts without a GPU, in Triton's interpreter: the oracle's bits, and the bytes that are moved.

tests/unit/test_triton_cast.py says what an interpreter can and cannot show.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quaver import scaling
from quaver.kernels import layouts, triton_reduce, triton_rows
from tests.triton_kernels import (
    E4M3,
    E5M2,
    assert_same_bits,
    counting_bytes,
    every_value,
    interpreting_process,
)

FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
WANTED = ((True, True), (True, False), (False, True))
NAN, INF = math.nan, math.inf


def assert_codes(row_codes, column_codes, expected_rows, expected_columns=None):
    """Those that were made are the oracle's, each in its layout."""
    if row_codes is not None:
        assert row_codes.is_contiguous()
        assert_same_bits(row_codes, expected_rows)
    if column_codes is not None:
        assert column_codes.t().is_contiguous()
        assert_same_bits(column_codes, expected_rows if expected_columns is None else expected_columns)


def assert_sums(sums, hp):
    """Within what float32 additions in any order may lose; of integers nothing is lost."""
    wide = hp.double().cpu()
    bound = wide.abs().sum(0) * hp.shape[0] * 2**-24
    assert sums.dtype is torch.float32
    assert sums.shape == (hp.shape[1],)
    fine = bound.isfinite()
    assert ((sums.double().cpu() - wide.sum(0)).abs() <= bound)[fine].all()
    assert not sums.cpu()[~fine].isfinite().any()


def assert_layouts(hp, float8_dtype, *, power_of_2=False, sums=False, wanted=WANTED):
    with np.errstate(all="ignore"):  # the interpreter's infinities and NaNs are wanted
        for rows, columns in wanted:
            made = layouts.cast_layouts(
                hp, float8_dtype, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=sums
            )
            codes, *scales = scaling.dynamic_cast(hp.cpu(), float8_dtype, power_of_2=power_of_2)
            assert ((made.row_codes is None), (made.column_codes is None)) == (not rows, not columns)
            assert_codes(made.row_codes, made.column_codes, codes)
            for got, expected in zip((made.quant_scale, made.dequant_scale), scales, strict=True):
                assert_same_bits(got, expected)
            if sums:
                assert_sums(made.column_sums, hp)
            else:
                assert made.column_sums is None


def assert_kept(hp, scale, float8_dtype, *, power_of_2=False, sums=False, wanted=WANTED):
    quant_scale = torch.tensor(scale)
    with np.errstate(all="ignore"):
        for rows, columns in wanted:
            made, seen = layouts.cast_with_persistent_scale(
                hp,
                quant_scale.to(hp.device),
                float8_dtype,
                rows=rows,
                columns=columns,
                power_of_2=power_of_2,
                column_sums=sums,
            )
            codes, *rest = scaling.cast_with_persistent_scale(
                hp.cpu(), quant_scale, float8_dtype, power_of_2=power_of_2
            )
            assert_codes(made.row_codes, made.column_codes, codes)
            for got, expected in zip((made.quant_scale, made.dequant_scale, seen), rest, strict=True):
                assert_same_bits(got, expected)
            if sums:
                assert_sums(made.column_sums, hp)


def assert_axes(hp, float8_dtype, *, power_of_2=False, sums=False, wanted=WANTED):
    with np.errstate(all="ignore"):
        for rows, columns in wanted:
            made = layouts.cast_axes(
                hp, float8_dtype, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=sums
            )
            assert ((made.rows is None), (made.columns is None)) == (not rows, not columns)
            for cast, dim in ((made.rows, 1), (made.columns, 0)):
                if cast is not None:
                    expected = scaling.dynamic_cast(hp.cpu(), float8_dtype, dim, power_of_2=power_of_2)
                    for got, oracle in zip(cast, expected, strict=True):
                        assert_same_bits(got, oracle)
                    assert (cast.codes if dim else cast.codes.t()).is_contiguous()
            if sums:
                assert_sums(made.column_sums, hp)


def assert_given(hp, float8_dtype, row_scale, column_scale):
    with np.errstate(all="ignore"):
        made = layouts.cast_with_scales(
            hp,
            float8_dtype,
            row_scale=None if row_scale is None else row_scale.to(hp.device),
            column_scale=None if column_scale is None else column_scale.to(hp.device),
        )
    for got, scale in zip(made, (row_scale, column_scale), strict=True):
        assert (got is None) == (scale is None)
    expected = [
        s if s is None else scaling.cast_to_float8(hp.cpu(), s, float8_dtype) for s in (row_scale, column_scale)
    ]
    assert_codes(*made, *expected)


def varied(rows, columns, dtype):
    """Rows and columns of different sizes, some of zeros, some outliers."""
    hp = torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    hp = hp * torch.exp2(torch.randint(-6, 6, (1, columns)).float())
    hp[rows // 2] = 0
    hp[:, columns // 2] = -0.0
    hp[-1, -1] = -7.25e3  # the last element matters
    return hp.to(dtype)


# What runs in the interpreter's process.


def _every_value(hp_dtype, float8_dtype):
    """A row, or a column, is of the values that share their upper 8 bits: all sizes of amax, and all kinds."""
    hp = every_value(hp_dtype).view(256, 256)
    for scale in (1.0, 0.37, 448e12, 1e-42, INF):
        assert_kept(hp, scale, float8_dtype, wanted=WANTED[:1])
    for matrix in (hp, hp.t().contiguous()):
        assert_axes(matrix, float8_dtype, wanted=WANTED[:1])
        assert_given(matrix, float8_dtype, torch.tensor(3.7), torch.tensor(3.7))
    assert_axes(hp, float8_dtype, power_of_2=True, wanted=WANTED[1:2])
    finite = hp[hp.isfinite().all(1)]
    assert_layouts(finite[: len(finite) // 16 * 16], float8_dtype, wanted=WANTED[:1])


def _unusual_amaxes(hp_dtype, float8_dtype):
    for values in ([0.0, -0.0], [1e-20, 0.0], [1e-40, 0.0], [1.0, NAN], [1.0, INF], [-INF, NAN], [3e4, -6e4]):
        hp = torch.tensor(values).repeat(2, 1).to(hp_dtype)
        for power_of_2 in (False, True):
            assert_layouts(hp, float8_dtype, power_of_2=power_of_2, sums=True, wanted=WANTED[:1])
            assert_axes(hp, float8_dtype, power_of_2=power_of_2, sums=True, wanted=WANTED[:2])
        for scale in (0.0, -3.0, NAN):
            assert_kept(hp, scale, float8_dtype, wanted=WANTED[:1])


def _shapes(hp_dtype, float8_dtype):
    for shape in ((1, 1), (1, 40), (33, 1), (3, 5), (70, 45), (16, 32), (144, 80)):
        hp = varied(*shape, hp_dtype)
        assert_layouts(hp, float8_dtype, wanted=WANTED[::2], sums=True)
        assert_kept(hp, 100.0, float8_dtype, wanted=WANTED[:1], sums=True)
        assert_axes(hp, float8_dtype, power_of_2=True)
        row_scale, column_scale = torch.rand(shape[0], 1) * 9, torch.rand(1, shape[1]) * 9
        assert_given(hp, float8_dtype, row_scale, column_scale)
        assert_given(hp, float8_dtype, None, torch.tensor(0.7))
    off_16_bytes = varied(6, 16, hp_dtype).view(-1)[1:81].view(5, 16)
    assert_layouts(off_16_bytes, float8_dtype)
    assert_axes(off_16_bytes, float8_dtype)


def _empties():
    for shape in ((0, 5), (5, 0), (0, 0)):
        hp = torch.zeros(shape)
        assert_layouts(hp, E4M3, sums=True)
        assert_kept(hp, 0.0, E4M3, sums=True)
        assert_axes(hp, E4M3, sums=True)
        assert_given(hp, E4M3, torch.ones(shape[0], 1), torch.tensor(2.0))


def _rows_of_every_width():
    """Those that fit on the chip, in tiles of many rows, of one row, and not filling it; and wider ones."""
    for width in (7, 64, 100, 4096, 5000):
        assert_axes(varied(19, width, torch.bfloat16), E4M3, wanted=WANTED[1:2])
    triton_rows.WIDEST = triton_rows.WIDEST_BYTES_WITH_SUMS = 64
    for sums in (False, True):
        assert_axes(varied(19, 80, torch.bfloat16), E4M3, wanted=WANTED[1:2], sums=sums)


def _blocks_of_rows_are_joined():
    """Column amaxes and sums over several programs, and several tiles of each."""
    triton_reduce.BLOCK_ROWS, triton_reduce.PROGRAMS = 64, 1
    triton_rows.SUM_BLOCKS, triton_rows.SUM_ROWS, triton_rows.TILE_ELEMENTS = 3, 1, 1024
    integers = torch.randint(-50, 50, (300, 24))
    for hp in (integers.float(), integers.bfloat16()):
        assert_axes(hp, E4M3, wanted=WANTED[:1])
        for rows, columns in WANTED:
            sums = layouts.cast_axes(hp, E5M2, rows=rows, columns=columns, column_sums=True).column_sums
            assert sums.equal(integers.sum(0).float())
        assert layouts.cast_layouts(hp, E5M2, rows=True, columns=True, column_sums=True).column_sums.equal(sums)
    assert_axes(varied(300, 24, torch.bfloat16), E5M2, sums=True)


def _saturated_elements_are_counted():
    for float8_dtype, limit in ((E4M3, 464.0), (E5M2, 61440.0)):  # halfway from 448 to 480, from 57344 to 65536
        above = np.nextafter(np.float32(limit), np.float32(INF))
        hp = torch.zeros(200, 100)
        hp[::50, ::99] = torch.tensor([[limit, -limit], [above, -above], [INF, NAN], [above, 0.0]])
        assert_kept(hp, 1.0, float8_dtype, wanted=WANTED[:1])
        made, seen = layouts.cast_with_persistent_scale(hp, torch.tensor(1.0), float8_dtype, rows=True, columns=True)
        assert seen[1] == 3


def _bytes(cast, hp_dtype):
    """The bytes of hp, of codes and of all else that a cast moves for each element."""
    hp = varied(256, 512, hp_dtype)
    casts = {
        "layouts": lambda rows, columns: layouts.cast_layouts(hp, E4M3, rows=rows, columns=columns),
        "known": lambda rows, columns: layouts.cast_with_persistent_scale(
            hp, torch.tensor(2.0), E4M3, rows=rows, columns=columns
        ),
        "unknown": lambda rows, columns: layouts.cast_with_persistent_scale(
            hp, torch.tensor(0.0), E4M3, rows=rows, columns=columns
        ),
        "axes": lambda rows, columns: layouts.cast_axes(hp, E4M3, rows=rows, columns=columns),
        "sums": lambda rows, columns: layouts.cast_layouts(hp, E5M2, rows=rows, columns=columns, column_sums=True),
        "axes and sums": lambda rows, columns: layouts.cast_axes(
            hp, E4M3, rows=rows, columns=columns, column_sums=True
        ),
        "given": lambda rows, columns: layouts.cast_with_scales(
            hp,
            E4M3,
            row_scale=torch.tensor(2.0) if rows else None,
            column_scale=torch.ones(1, 512) if columns else None,
        ),
    }
    moved = []
    for rows, columns in WANTED[1:] + WANTED[:1]:
        with counting_bytes() as counted:
            casts[cast](rows, columns)
        of_hp = counted.pop({torch.float32: "fp32", torch.bfloat16: "bf16"}[hp_dtype])
        of_codes = counted.pop("fp8e4nv", 0) + counted.pop("fp8e5", 0)
        moved.append(((of_hp + of_codes) / hp.numel(), sum(counted.values()) / hp.numel()))
    return moved


@pytest.fixture(scope="module")
def interpreter():
    with interpreting_process() as call:
        yield call


@FLOAT8
@HP
def test_every_value(interpreter, hp_dtype, float8_dtype):
    interpreter(_every_value, hp_dtype, float8_dtype)


@pytest.mark.parametrize(("hp_dtype", "float8_dtype"), [(torch.float32, E5M2), (torch.bfloat16, E4M3)], ids=str)
def test_unusual_amaxes(interpreter, hp_dtype, float8_dtype):
    interpreter(_unusual_amaxes, hp_dtype, float8_dtype)


@pytest.mark.parametrize(
    ("hp_dtype", "float8_dtype"), [(torch.float32, E5M2), (torch.bfloat16, E4M3), (torch.float16, E5M2)], ids=str
)
def test_shapes(interpreter, hp_dtype, float8_dtype):
    interpreter(_shapes, hp_dtype, float8_dtype)


def test_empties(interpreter):
    interpreter(_empties)


def test_saturated_elements_are_counted(interpreter):
    interpreter(_saturated_elements_are_counted)


@pytest.mark.parametrize(
    ("cast", "of_rows", "of_columns", "of_both"),
    [
        ("layouts", 5, 5, 6),
        ("known", 3, 3, 4),
        ("unknown", 5, 5, 6),
        ("axes", 3, 5, 6),
        ("sums", 5, 5, 6),
        ("axes and sums", 3, 5, 6),
        ("given", 3, 3, 4),
    ],
)
def test_bytes_of_a_bfloat16_element(interpreter, cast, of_rows, of_columns, of_both):
    moved = interpreter(_bytes, cast, torch.bfloat16)
    assert [elements for elements, _ in moved] == [of_rows, of_columns, of_both]
    assert max(rest for _, rest in moved) < 0.3  # scales, amaxes and partial sums, of a small matrix


# Last, because they change the interpreter's module.
def test_rows_of_every_width(interpreter):
    interpreter(_rows_of_every_width)


def test_blocks_of_rows_are_joined(interpreter):
    interpreter(_blocks_of_rows_are_joined)
