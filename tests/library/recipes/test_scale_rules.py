"""Compares the rules of serving engines with their equations in NumPy, and the casts that compute them.

Foreign oracles are in tests/library/third_party/test_serving.py.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from quaver import CastConfig, Float8LinearConfig, ScaleCalculationMode, ScalingGranularity, ScalingType
from quaver.kernels.cast import CASTS, MATERIALIZED_CASTS
from quaver.recipes.scale_rules import SCALE_RULES
from tests.recipes import E4M3
from tests.reference import assert_same_bits, draw_samples

F = np.float32
HP = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: F}
LAYOUTS = {
    "tensorwise": {},
    "rowwise": {"scaling_granularity": ScalingGranularity.ROWWISE},
    "1 x 128": {"scaling_granularity": ScalingGranularity.BLOCKWISE, "block_size": (1, 128)},
    "128 x 128": {"scaling_granularity": ScalingGranularity.BLOCKWISE},
}


def make_cast(rule, layout):
    return CastConfig(target_dtype=E4M3, scale_rule=rule, **LAYOUTS[layout])


def round_up(scale):
    """Return the smallest power of two that is not below the scale."""
    mantissa, exponent = np.frexp(scale)
    return np.where(np.isfinite(scale), np.ldexp(F(1), exponent - (mantissa == 0.5)), scale).astype(F)


def multiply(x, s):
    return x * (F(1) / s)


def divide(x, s):
    return x / s


def compute_pair(a, is_power_of_2):
    """Return the dequant_scale and the quant_scale."""
    scale = np.maximum(a, F(1e-10)) * (F(1) / F(448))
    return (round_up(scale), F(1) / round_up(scale)) if is_power_of_2 else (scale, F(448) / np.maximum(a, F(1e-10)))


def compute_pair_by_reciprocal(a, smallest=0.0):
    quant = (F(1) / np.maximum(a, F(smallest))) * F(448)
    return F(1) / quant, quant


def transformers(x, a, is_power_of_2):
    scale, quant = compute_pair_by_reciprocal(a)
    scale, quant = np.where(a == 0, F(1), scale), np.where(a == 0, F(1), quant)
    if is_power_of_2:
        scale = round_up(np.maximum(scale, F(2.0**-126)))
        quant = F(1) / scale
    return x * quant, scale


def sglang(x, a):
    scale = a / F(448)
    return np.where(scale == 0, F(0), multiply(x, scale)), scale


def compressed_tensors(x, a, hp):
    scale = (a / F(448)).astype(hp).astype(F)
    scale = np.where(scale == 0, F(ml_dtypes.finfo(hp).eps), scale)
    return (x / scale).astype(hp).astype(F) + F(0), scale


def with_scale(product, scale):
    return lambda x, a, _: (product(x, scale(a)), scale(a))


def with_pair(pair):
    return lambda x, a, _: (x * pair(a)[1], pair(a)[0])


def clamp_scale(a):
    return np.maximum(a / F(448), F(1) / (F(448) * F(512)))


EQUATIONS = {
    "vllm": with_scale(multiply, clamp_scale),
    "vllm-kernel": with_scale(divide, clamp_scale),
    "vllm-group": with_scale(divide, lambda a: np.maximum(a, F(1e-10)) / F(448)),
    "vllm-group-ue8m0": with_scale(divide, lambda a: round_up(np.maximum(np.maximum(a, F(1e-10)) / F(448), F(1e-10)))),
    "sglang": lambda x, a, _: sglang(x, a),
    "sglang-tensor": with_pair(lambda a: compute_pair_by_reciprocal(a, 1e-12)),
    "sglang-group": with_pair(lambda a: compute_pair(a, False)),
    "sglang-group-ue8m0": with_pair(lambda a: compute_pair(a, True)),
    "deepgemm": with_scale(multiply, lambda a: np.maximum(a, F(1e-4)) / F(448)),
    "deepgemm-ue8m0": with_scale(multiply, lambda a: round_up(np.maximum(a, F(1e-4)) / F(448))),
    "transformers": lambda x, a, _: transformers(x, a, False),
    "transformers-ue8m0": lambda x, a, _: transformers(x, a, True),
    "transformers-group": with_scale(divide, lambda a: np.maximum(a / F(448), F(1e-12))),
    "compressed-tensors": compressed_tensors,
}


def compute_amaxes(x, layout):
    """Return for each element the amax of its block."""
    magnitude = np.abs(x)
    if layout == "tensorwise":
        return np.broadcast_to(magnitude.max(), x.shape)
    rows, columns = {"rowwise": (1, x.shape[1]), "1 x 128": (1, 128), "128 x 128": (128, 128)}[layout]
    amaxes = np.empty_like(x)
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        block = slice(i, i + rows), slice(j, j + columns)
        amaxes[block] = magnitude[block].max()
    return amaxes


@np.errstate(all="ignore")
def cast_by_equation(rule, hp, layout):
    """Return the codes, and the dequant_scale of each element."""
    x = hp.float().numpy()
    amaxes = compute_amaxes(x, layout)
    product, scale = EQUATIONS[rule](x, amaxes, HP[hp.dtype])
    product = np.where(np.isnan(amaxes) | np.isinf(x), F(np.nan), product)
    codes = np.clip(product, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn)
    scales = torch.from_numpy(np.where(np.isnan(amaxes), amaxes, scale))
    return torch.from_numpy(codes.view(np.uint8)).view(E4M3), scales


def test_every_rule_has_its_equation():
    assert SCALE_RULES.keys() == EQUATIONS.keys()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", HP, ids=str)
def test_casts_are_the_equations(rule, dtype):
    """Casts in C, and by the operation that compiled code calls; PyTorch is the oracle of the Triton kernels."""
    for hp, layout in itertools.product(draw_samples(dtype), LAYOUTS):
        cast = make_cast(rule, layout)
        codes, scales = cast_by_equation(rule, hp, layout)
        for table in (CASTS, MATERIALIZED_CASTS):
            operand = table[cast.scaling_granularity](hp, E4M3, True, True, False, *cast.trailing_arguments).row
            assert_same_bits(operand.data, codes)
            rows, columns = operand.layout.get_block_shape(hp.shape)
            scale = operand.dequant_scale.view(operand.layout.get_scale_shape(*hp.shape) or (1, 1))
            repeated = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            assert_same_bits(repeated[: hp.shape[0], : hp.shape[1]], scales)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rule": "vlm"}, "scale_rule: expected None or one of vllm, "),
        ({"scale_rule": "vllm", "scaling_type": ScalingType.DELAYED}, "scaling_type: expected dynamic with"),
        ({"scale_rule": "vllm", "target_dtype": torch.float8_e5m2}, "target_dtype: expected e4m3 with"),
        (
            {"scale_rule": "deepgemm", "scale_calculation_mode": ScaleCalculationMode.RCEIL, **LAYOUTS["128 x 128"]},
            "scale_calculation_mode: expected None next to scale_rule",
        ),
    ],
)
def test_options_that_exclude_a_rule_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CastConfig(**options)


def test_rules_that_an_all_gather_lacks_are_refused():
    for rule, other in (("vllm-kernel", "vllm-kernel"), ("vllm", None)):
        with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather: expected False with"):
            Float8LinearConfig(
                cast_config_weight=CastConfig(scale_rule=rule),
                cast_config_weight_for_grad_input=CastConfig(scale_rule=other),
                enable_fsdp_float8_all_gather=True,
            )
