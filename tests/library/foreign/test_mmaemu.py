"""Compares the sums of Hopper's tensor cores with mmaemu's, which were checked on an H100 PCIe, if it is installed."""

import pytest
import torch

from quaver.numerics.accumulation import HOPPER, accumulate

mmaemu = pytest.importorskip("mmaemu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("use_fast_accum", [True, False])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(7, 16, 9), (5, 144, 6), (9, 1040, 3), (3, 4096, 4)])
def test_sums_are_equal_to_the_bit(m, k, n, dtypes, use_fast_accum):
    a, b = (
        torch.randn(rows, k) * torch.exp2(torch.randint(-12, 8, (rows, k)).float()) + shift
        for rows, shift in ((m, 0.0), (n, 1.0))
    )
    a, b = (operand.clamp(-448, 448).to(dtype) for operand, dtype in zip((a, b), dtypes, strict=True))
    expected = mmaemu.accumulate(a, b, use_fast_accum=use_fast_accum, splitk=1, profile="hopper")
    assert torch.equal(accumulate(a, b, HOPPER, use_fast_accum=use_fast_accum), expected)
