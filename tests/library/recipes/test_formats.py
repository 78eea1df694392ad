"""Compares the table of formats with the bytes that torch decodes."""

import math

import pytest
import torch

from quaver.recipes.formats import FLOAT8_FORMATS, get_format


@pytest.mark.parametrize("fmt", FLOAT8_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_table_describes_all_256_codes(fmt):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    finite = values[torch.isfinite(values)]
    positive = finite[finite > 0]
    assert {code for code, value in enumerate(values) if math.isnan(value)} == set(fmt.nan_codes)
    assert {code for code, value in enumerate(values) if math.isinf(value)} == set(fmt.infinity_codes)
    assert len(finite) == 2**fmt.bits - len(fmt.nan_codes) - len(fmt.infinity_codes)
    assert finite.max() == fmt.max == torch.finfo(fmt.dtype).max
    assert positive.min() == fmt.smallest_subnormal
    assert torch.finfo(fmt.dtype).smallest_normal == fmt.smallest_normal
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8
    assert fmt.max_relative_error == (positive[positive > 1].min() - 1) / 2


def test_a_dtype_that_is_not_float8_has_no_format():
    with pytest.raises(ValueError, match=r"expected a float8 dtype .* got torch.bfloat16"):
        get_format(torch.bfloat16)
