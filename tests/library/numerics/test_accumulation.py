"""Tests the sums of Hopper's tensor cores: bits that mmaemu recorded, the rule in rational numbers, and scales."""

import math
from fractions import Fraction

import pytest
import torch

from quaver.numerics.accumulation import HOPPER, Accumulation, accumulate
from quaver.numerics.matmul_sums import BFLOAT16_DB, MatmulSqnrs
from tests.library.numerics.samples import compare_sums
from tests.recipes import E4M3, E5M2
from tests.reference import assert_same_bits


def make_codes(rows, columns, step, dtype):
    """Return finite codes of all exponents, a third of them negative."""
    n = torch.arange(rows * columns).view(rows, columns)
    return ((n * n * step + n * 7) % 251 % 124 + 128 * ((n * step) % 3 == 0)).to(torch.uint8).view(dtype)


RECORDED = {
    (E4M3, True): [986688.0, 882112.0, 2222848.0, 920064.0, 955520.0, 856000.0],
    (E4M3, False): [992696.0, 888886.0, 2233952.0, 926734.0, 961837.0, 863044.0],
    (E5M2, True): [75497472.0, 46997504.0, 206635008.0, 53968896.0, 73203712.0, 44929024.0],
    (E5M2, False): [75803136.0, 47161792.0, 207118336.0, 54228256.0, 73488624.0, 45103968.0],
}
"""`mmaemu.accumulate(a, b, use_fast_accum=..., splitk=1)`, mmaemu 0.1.0, an H100 PCIe; K is 1,200."""


@pytest.mark.parametrize(("dtype", "is_fast"), RECORDED)
def test_sums_have_the_bits_of_mmaemu(dtype, is_fast):
    a, b = make_codes(2, 1200, 5, dtype), make_codes(3, 1200, 11, E4M3)
    expected = torch.tensor(RECORDED[dtype, is_fast]).view(2, 3)
    assert_same_bits(accumulate(a, b, HOPPER, use_fast_accum=is_fast), expected)


def get_exponent(value):
    return math.frexp(value)[1] - 1


def truncate(value, unit):
    return int(value / unit) * unit  # int() truncates toward zero


def sum_by_rule(a, b, rule, smallest):
    """Return one dot product by the rule of accumulation.py, in rational numbers."""
    total = Fraction(0)
    for start in range(0, len(a), rule.products_per_step):
        step = slice(start, start + rule.products_per_step)
        pairs = [(x, y) for x, y in zip(a[step], b[step], strict=True) if x * y]
        exponents = [max(get_exponent(x), smallest) + max(get_exponent(y), smallest) for x, y in pairs]
        exponents += [get_exponent(total)] if total else []
        unit = Fraction(2) ** (max(exponents, default=0) - rule.fraction_bits)
        total = truncate(total, unit) + sum(truncate(Fraction(x) * Fraction(y), unit) for x, y in pairs)
        total = truncate(total, Fraction(2) ** (get_exponent(total) - rule.fraction_bits)) if total else total
    return float(total)


@pytest.mark.parametrize("rule", [HOPPER, Accumulation(16, 9, 48)])
def test_sums_follow_the_rule_in_rational_numbers(rule):
    a, b = (torch.randn(2, 200) * torch.exp2(torch.randint(-10, 6, (2, 200)).float()) for _ in range(2))
    a, b = a.to(E4M3), b.to(E4M3)
    rows = a.float().tolist(), b.float().tolist()
    expected = [[sum_by_rule(x, y, rule, -6) for y in rows[1]] for x in rows[0]]
    assert accumulate(a, b, rule, use_fast_accum=True).tolist() == expected
    total = torch.zeros(2, 2)
    for start in range(0, 200, rule.products_per_chain):
        parts = [[x[start : start + rule.products_per_chain] for x in side] for side in rows]
        total += torch.tensor([[sum_by_rule(x, y, rule, -6) for y in parts[1]] for x in parts[0]])
    assert_same_bits(accumulate(a, b, rule, use_fast_accum=False), total)


def test_a_subnormal_code_has_the_exponent_of_the_smallest_normal_one():
    """2^-9 x 256 is 1/2, and aligns the others as 4 would: 31 products of 2^-12 are below 2^(2 - 13)."""
    a, b = torch.full((1, 32), 2.0**-6), torch.full((1, 32), 2.0**-6)
    a[0, 0], b[0, 0] = 2.0**-9, 256.0
    assert accumulate(a.to(E4M3), b.to(E4M3), HOPPER, use_fast_accum=True).item() == 0.5
    a[0, 0], b[0, 0] = 2.0**-6, 32.0
    assert accumulate(a.to(E4M3), b.to(E4M3), HOPPER, use_fast_accum=True).item() == 0.5 + 31 * 2.0**-12


def test_sums_keep_nonfinite_values_and_take_empty_operands():
    a, b = torch.ones(2, 64), torch.ones(3, 64)
    a[0, 3] = math.nan
    sums = accumulate(a.to(E4M3), b.to(E4M3), HOPPER, use_fast_accum=False)
    assert sums[0].isnan().all()
    assert sums[1].tolist() == [64.0] * 3
    a[0, 3] = -math.inf
    assert accumulate(a.to(E5M2), b.to(E4M3), HOPPER, use_fast_accum=True)[0].tolist() == [-math.inf] * 3
    assert accumulate(a.to(E4M3)[:, :0], b.to(E4M3)[:, :0], HOPPER, use_fast_accum=False).tolist() == [[0.0] * 3] * 2
    assert accumulate(a.to(E4M3)[:0], b.to(E4M3), HOPPER, use_fast_accum=True).shape == (0, 3)


@pytest.mark.parametrize(
    ("operands", "fast", "exact", "casts"), [("normal", 57.2, 77.8, 28.5), ("positive", 23.0, 63.7, 55.3)]
)
def test_sums_and_casts_lose_the_documented_decibels(operands, fast, exact, casts):
    """The rows of docs/numerics.md for K = 4096."""
    left, right = torch.randn(2, 16, 4096)
    if operands == "positive":
        left, right = left.abs(), right.abs()
    assert compare_sums("tensorwise", left, right) == pytest.approx((casts, fast, exact), abs=1.5)


def test_sums_take_scales_of_rows_and_blocks():
    """Rows of all sizes weigh as their scales say; scales of 128 multiply each chain, and those of 32 nothing runs."""
    left, right = torch.randn(64, 512).abs() * 2.0 ** torch.arange(64)[:, None], torch.randn(40, 512).abs()
    rows, blocks = compare_sums("rowwise", left, right), compare_sums("blockwise", left, right)
    assert rows.fast == pytest.approx(compare_sums("rowwise", left[-1:], right).fast, abs=2)
    assert blocks.fast == blocks.exact == pytest.approx(rows.exact, abs=3)
    assert compare_sums("mxfp8", left, right) is None


def test_sums_may_lose_what_rounding_to_bfloat16_does():
    assert (
        MatmulSqnrs(casts=60.0, fast=50.0, exact=70.0).compute_bound_db() == BFLOAT16_DB == pytest.approx(48.2, abs=0.1)
    )
    assert MatmulSqnrs(casts=28.0, fast=50.0, exact=70.0).compute_bound_db() == 28.0
