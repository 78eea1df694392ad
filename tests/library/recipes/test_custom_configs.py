"""Tests configs that are no recipe: matmuls left in high precision, and other formats."""

import contextlib
import itertools
import math

import pytest
import torch

from quaver import CastConfig, Float8Linear, Float8LinearConfig, ScalingGranularity, ScalingType, cast_weights_once
from quaver.recipes.formats import FLOAT8_FORMATS
from tests.recipes import E4M3, E5M2
from tests.reference import lowest_sqnr_db, reference_linear, sqnr_db
from tests.steps import compute_results

TENSOR, ROW = CastConfig(), CastConfig(scaling_granularity=ScalingGranularity.ROWWISE)
HP = CastConfig(scaling_type=ScalingType.DISABLED)
NAMES = ("input", "input_for_grad_weight", "weight", "weight_for_grad_input")
NAMES += ("grad_output", "grad_output_for_grad_weight")


def make_config(casts, **options):
    fields = {f"cast_config_{name}": cast for name, cast in zip(NAMES, casts, strict=True)}
    return Float8LinearConfig(**fields, **options)


def run_step(config, input, grad_output, weight, *, scoped=False):
    module = Float8Linear(64, 48, bias=False, dtype=weight.dtype, config=config)
    module.load_state_dict({"weight": weight})
    with cast_weights_once(module) if scoped else contextlib.nullcontext():
        return compute_results(module, input, grad_output=grad_output)


@pytest.fixture
def operands():
    return torch.randn(80, 64), torch.randn(80, 48), torch.randn(48, 64)


@pytest.mark.parametrize("in_float8", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_any_matmul_may_stay_in_high_precision(in_float8, hp_dtype, autocast, operands):
    input, grad_output, weight = (tensor.to(hp_dtype) for tensor in operands)
    output_fp8, grad_input_fp8, grad_weight_fp8 = in_float8
    row, row_of_gradient, column_of_weight, column = (
        cast if fp8 else HP
        for cast, fp8 in ((ROW, output_fp8), (ROW, grad_input_fp8), (TENSOR, grad_input_fp8), (TENSOR, grad_weight_fp8))
    )
    config = make_config((row, column, row, column_of_weight, row_of_gradient, column))
    for scoped in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            results = run_step(config, input, grad_output, weight, scoped=scoped)
        # bfloat16 has 7 mantissa bits. Any order of a float32 sum of K <= 80 products is within K * 2^-24 of it.
        is_bfloat16 = autocast or hp_dtype is torch.bfloat16
        exact_db = lowest_sqnr_db(7, 7, 7) if is_bfloat16 else 20 * math.log10(2**24 / 80)
        formats = (3, 3), (2, 3), (2, 3)
        expected = reference_linear(input, weight, grad_output)
        for fp8, bits, reference, result in zip(in_float8, formats, expected, results, strict=True):
            assert (sqnr_db(reference, result) > exact_db) == (not fp8)
            assert sqnr_db(reference, result) > lowest_sqnr_db(*bits)


@pytest.mark.parametrize(
    "dtypes",  # of input, weight and grad_output
    [(E5M2, E4M3, E4M3), (torch.float8_e4m3fnuz,) * 3],  # fnuz formats run on the exact backend
)
def test_formats_may_be_others(dtypes, operands):
    input, grad_output, weight = operands
    casts = [CastConfig(target_dtype=dtype) for dtype in dtypes for _ in range(2)]
    results = run_step(make_config(casts), input, grad_output, weight)
    i, w, g = (FLOAT8_FORMATS[dtype].mantissa_bits for dtype in dtypes)
    expected = reference_linear(input, weight, grad_output)
    for bits, reference, result in zip(((i, w), (g, w), (g, i)), expected, results, strict=True):
        assert sqnr_db(reference, result) > lowest_sqnr_db(*bits)
