"""Random configs, of which most are no recipe: `Float8Linear` has the results of the reference.

The data is hard: rows of other magnitudes, and rows and columns of zeros.
"""

import contextlib
import random

import pytest
import torch

from quaver import CastConfig, Float8Linear, Float8LinearConfig, ScalingGranularity, ScalingType, cast_weights_once
from quaver.recipes.cast_config import ScaleCalculationMode
from quaver.recipes.reference import ReferenceLinear
from quaver.recipes.scale_rules import RULES
from tests.reference import sqnr_db
from tests.steps import results_of
from tests.thinned import at_night

SHAPES = (33, 48, 64), (130, 144, 80), (20, 40, 136)
COLUMN = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}


def draw_cast(draw: random.Random, operand: str) -> CastConfig:
    rule = draw.choice(list(RULES)) if draw.random() < 0.2 else None
    dtype = torch.float8_e4m3fn if rule else draw.choice([None] * 8 + [torch.float8_e4m3fn, torch.float8_e5m2])
    length = draw.choice([32, 128])
    mode = None if rule else draw.choice([None, None, None, ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR])
    options = draw.choices(
        [
            {"scaling_type": ScalingType.DISABLED},
            {},
            {"scaling_granularity": ScalingGranularity.ROWWISE},
            {
                "scaling_granularity": ScalingGranularity.BLOCKWISE,
                "block_size": (length if operand == "weight" else 1, length),
                "scale_calculation_mode": mode,
            },
        ],
        [0.5, 3, 2, 4],
    )[0]
    return CastConfig(target_dtype=dtype, scale_rule=None if "scaling_type" in options else rule, **options)


def draw_config(draw: random.Random) -> Float8LinearConfig | None:
    casts = {}
    for operand, matmul in COLUMN.items():
        casts[f"cast_config_{operand}"] = draw_cast(draw, operand)
        if draw.random() < 0.6:
            casts[f"cast_config_{operand}_for_{matmul}"] = draw_cast(draw, operand)
    try:
        return Float8LinearConfig(
            round_scales_to_power_of_2=draw.random() < 0.5,
            backward=draw.choice(["float8"] * 8 + ["dequantized", "high_precision"]),
            keep_float8_weight_for_backward=draw.random() < 0.3,
            **casts,
        )
    except ValueError:
        return None


def draw_matrix(draw: random.Random, rows: int, columns: int) -> torch.Tensor:
    matrix = torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 6, (rows, 1)).float())
    matrix[draw.randrange(rows)] = 0
    if draw.random() < 0.5:
        matrix[:, draw.randrange(columns)] = 0
    return matrix


@pytest.mark.parametrize("seed", [0, *at_night((seed,) for seed in range(1, 20))])
def test_results_are_those_of_the_reference(seed):
    draw = random.Random(seed)
    configs = [config for _ in range(1000) if (config := draw_config(draw))]
    assert len(configs) > 100
    for config in configs:
        tokens, k, n = draw.choice(SHAPES)
        module, reference = (make(k, n, bias=False, config=config) for make in (Float8Linear, ReferenceLinear))
        module.load_state_dict({"weight": draw_matrix(draw, n, k)})
        reference.load_state_dict(module.state_dict())
        input, grad_output = draw_matrix(draw, tokens, k), draw_matrix(draw, tokens, n)
        with cast_weights_once(module) if draw.random() < 0.3 else contextlib.nullcontext():
            got = results_of(module, input, grad_output=grad_output)
        expected = results_of(reference, input, grad_output=grad_output)
        for name, one, other in zip(("output", "grad_input", "grad_weight"), expected, got, strict=True):
            assert torch.equal(one, other) or sqnr_db(one, other) > 100, (name, config)
