"""The casts of layouts.py where no Triton runs: the oracle with a transpose; operations of a compiler; errors."""

import pytest
import torch

from quaver import scaling
from quaver.kernels import layouts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WANTED = pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def matrix(rows=6, columns=10, dtype=torch.bfloat16):
    return torch.randn(rows, columns, dtype=dtype) * torch.tensor([1.0, 1e3]).repeat(columns // 2).to(dtype)


def assert_layout(codes, expected, *, along_rows):
    assert (codes if along_rows else codes.t()).is_contiguous()
    assert codes.view(torch.uint8).equal(expected.view(torch.uint8))


@WANTED
@pytest.mark.parametrize("power_of_2", [False, True])
def test_one_scale(rows, columns, power_of_2):
    hp = matrix()
    codes, quant, dequant = scaling.dynamic_cast(hp, E4M3, power_of_2=power_of_2)
    made = layouts.cast_layouts(hp, E4M3, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=True)
    for got, wanted, along_rows in ((made.row_codes, rows, True), (made.column_codes, columns, False)):
        assert (got is not None) == wanted
        if wanted:
            assert_layout(got, codes, along_rows=along_rows)
    assert made.quant_scale.equal(quant)
    assert made.dequant_scale.equal(dequant)
    assert made.column_sums.equal(hp.float().sum(0))


@WANTED
@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_a_kept_scale(rows, columns, scale):
    hp, kept = matrix(), torch.tensor(scale)
    codes, quant, dequant, observed = scaling.cast_with_persistent_scale(hp, kept, E5M2)
    made, seen = layouts.cast_with_persistent_scale(hp, kept, E5M2, rows=rows, columns=columns)
    if rows:
        assert_layout(made.row_codes, codes, along_rows=True)
    if columns:
        assert_layout(made.column_codes, codes, along_rows=False)
    assert (made.quant_scale.item(), made.dequant_scale.item()) == (quant.item(), dequant.item())
    assert seen.equal(observed)
    assert made.column_sums is None


@WANTED
def test_scales_of_axes(rows, columns):
    hp = matrix()
    made = layouts.cast_axes(hp, E4M3, rows=rows, columns=columns, power_of_2=True, column_sums=True)
    for cast, wanted, dim in ((made.rows, rows, 1), (made.columns, columns, 0)):
        assert (cast is not None) == wanted
        if wanted:
            codes, quant, dequant = scaling.dynamic_cast(hp, E4M3, dim, power_of_2=True)
            assert_layout(cast.codes, codes, along_rows=dim == 1)
            assert cast.quant_scale.equal(quant)
            assert cast.dequant_scale.equal(dequant)
    assert made.column_sums.equal(hp.float().sum(0))


def test_given_scales():
    hp = matrix()
    one, of_rows, of_columns = torch.tensor(0.25), torch.rand(6, 1) + 1, torch.rand(1, 10) + 1
    for row_scale, column_scale in ((one, one), (of_rows, of_columns), (of_rows, one), (None, of_columns), (one, None)):
        row_codes, column_codes = layouts.cast_with_scales(hp, E4M3, row_scale=row_scale, column_scale=column_scale)
        for codes, scale, along_rows in ((row_codes, row_scale, True), (column_codes, column_scale, False)):
            assert (codes is None) == (scale is None)
            if scale is not None:
                assert_layout(codes, scaling.cast_to_float8(hp, scale, E4M3), along_rows=along_rows)


@pytest.mark.parametrize("strided", [matrix(10, 6).t(), matrix(6, 20)[:, ::2], matrix(6, 2)[:, :1].expand(6, 10)])
def test_strides_do_not_matter(strided):
    made = layouts.cast_layouts(strided, E4M3, rows=True, columns=True)
    codes = scaling.dynamic_cast(strided.contiguous(), E4M3)[0]
    assert_layout(made.row_codes, codes, along_rows=True)
    assert_layout(made.column_codes, codes, along_rows=False)


def test_bad_arguments():
    hp = matrix()
    with pytest.raises(ValueError, match="expected row codes, column codes or both to be wanted, got neither"):
        layouts.cast_axes(hp, E4M3, rows=False, columns=False)
    with pytest.raises(ValueError, match=r"expected a matrix of .*, got torch.bfloat16 of shape \[60\]"):
        layouts.cast_layouts(hp.view(-1), E4M3, rows=True, columns=True)
    with pytest.raises(ValueError, match="got torch.float64"):
        layouts.cast_layouts(hp.double(), E4M3, rows=True, columns=True)
    with pytest.raises(ValueError, match=r"expected a float32 scale of shape \(\) or \[6, 1\], got .* of \[1, 10\]"):
        layouts.cast_with_scales(hp, E4M3, row_scale=torch.ones(1, 10), column_scale=None)
    with pytest.raises(ValueError, match=r"expected a float8 dtype .*, got torch.bfloat16"):
        layouts.cast_layouts(hp, torch.bfloat16, rows=True, columns=True)


# ---- compiled ----------------------------------------------------------------------------------------------------


def every_cast(hp, rows, columns):
    """All that the four casts return, which is not None."""
    one = hp.new_full((), 0.25, dtype=torch.float32)
    kept, seen = layouts.cast_with_persistent_scale(hp, one, E5M2, rows=rows, columns=columns, column_sums=True)
    axes = layouts.cast_axes(hp, E4M3, rows=rows, columns=columns, power_of_2=True)
    made = [
        *layouts.cast_layouts(hp, E4M3, rows=rows, columns=columns),
        *kept,
        seen,
        *(axes.rows or ()),
        *(axes.columns or ()),
        axes.column_sums,
        *layouts.cast_with_scales(hp, E4M3, row_scale=one if rows else None, column_scale=one if columns else None),
    ]
    return [tensor for tensor in made if tensor is not None]


@WANTED
def test_compiled_code_is_eager_code(rows, columns):
    hp = matrix(48, 32)
    eager = every_cast(hp, rows, columns)
    compiled = torch.compile(every_cast, fullgraph=True, backend="aot_eager")(hp, rows, columns)
    for got, expected in zip(compiled, eager, strict=True):
        assert got.stride() == expected.stride()
        assert got.dtype is expected.dtype
        assert (
            got.view(torch.uint8).equal(expected.view(torch.uint8)) if got.element_size() == 1 else got.equal(expected)
        )


@pytest.mark.parametrize("shape", [(6, 10), (1, 10), (6, 1), (0, 4), (4, 0)], ids=str)
@WANTED
def test_operations_keep_their_promises(rows, columns, shape):
    """Fake results have the shapes, dtypes and strides of real ones."""
    hp, one = torch.randn(shape, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    ops = torch.ops.quaver
    for operation, args in (
        (ops.cast_layouts, (hp, E4M3, rows, columns, False, True)),
        (ops.cast_layouts_with_persistent_scale, (hp, one, E4M3, rows, columns, False, False)),
        (ops.cast_axes, (hp, E5M2, rows, columns, True, True)),
        (ops.cast_with_scales, (hp, E4M3, one if rows else None, one if columns else None)),
    ):
        torch.library.opcheck(operation.default, args, test_utils=("test_schema", "test_faketensor"))
