"""The table of formats against the bytes that torch and ml_dtypes decode."""

import math

import numpy as np
import pytest
import torch

from quaver.recipes.formats import E4M3, E5M2, FORMATS, format_of
from tests.reference import ML_DTYPE


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_table_describes_all_256_codes(fmt):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    finite = values[torch.isfinite(values)]
    positive = finite[finite > 0]
    assert {i for i, v in enumerate(values) if math.isnan(v)} == set(fmt.nan_codes)
    assert {i for i, v in enumerate(values) if math.isinf(v)} == set(fmt.infinity_codes)
    assert len(finite) == fmt.finite_codes
    assert finite.max() == fmt.max == torch.finfo(fmt.dtype).max
    assert positive.min() == fmt.smallest_subnormal
    assert torch.finfo(fmt.dtype).smallest_normal == fmt.smallest_normal
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8


def test_published_numbers():
    assert (E4M3.max, E4M3.smallest_normal, E4M3.smallest_subnormal) == (1.75 * 2**8, 2**-6, 2**-9)
    assert (E5M2.max, E5M2.smallest_normal, E5M2.smallest_subnormal) == (1.75 * 2**15, 2**-14, 2**-16)
    assert (E4M3.finite_codes, E5M2.finite_codes) == (254, 248)
    assert (E4M3.max_relative_error, E5M2.max_relative_error) == (2**-4, 2**-3)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_values_agree_with_ml_dtypes(fmt):
    codes = np.arange(256, dtype=np.uint8)
    ours = torch.from_numpy(codes).view(fmt.dtype).float().numpy()
    np.testing.assert_array_equal(ours, codes.view(ML_DTYPE[fmt.dtype]).astype(np.float32))


def test_format_of_a_dtype_that_is_not_float8():
    with pytest.raises(ValueError, match=r"expected a float8 dtype .* got torch.bfloat16"):
        format_of(torch.bfloat16)
