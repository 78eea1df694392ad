"""Compares `Float8Linear` with the reference for random configs, and refusals of configs with `is_valid`.

The data is hard: rows of other magnitudes, and rows and columns of zeros.
"""

import contextlib
import math
import random

import pytest
import torch
from torch import nn

from quaver import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
    cast_weights_once,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from quaver.recipes.cast_config import ScaleCalculationMode
from quaver.recipes.reference import ReferenceLinear
from quaver.recipes.scale_rules import SCALE_RULES
from tests.recipes import E4M3, E5M2
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import compute_results
from tests.thinned import at_night

E2M1 = torch.float4_e2m1fn_x2
TENSOR, ROW, BLOCK = ScalingGranularity.TENSORWISE, ScalingGranularity.ROWWISE, ScalingGranularity.BLOCKWISE
SHAPES = (33, 48, 64), (130, 144, 80), (20, 40, 136)
COLUMN = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}


def draw_cast(draw, operand):
    """Draw the arguments of a `CastConfig`; most are valid."""
    types = ScalingType.DYNAMIC, ScalingType.DISABLED, ScalingType.DELAYED, ScalingType.STATIC
    cast = {
        "scaling_type": draw.choices(types, [20, 2, 2, 2])[0],
        "scaling_granularity": draw.choices((TENSOR, ROW, BLOCK), [3, 2, 4])[0],
        "target_dtype": draw.choices((None, E4M3, E5M2), [8, 1, 1])[0],
    }
    if draw.random() < 0.1:
        cast["scale_rule"] = draw.choice(list(SCALE_RULES))
    if cast["scaling_granularity"] is BLOCK:
        length = draw.choice([32, 128, 32, 128, 16])
        is_square = draw.random() < (0.9 if operand == "weight" else 0.1)
        cast["block_size"] = (length if is_square else 1, length)
        cast["scale_calculation_mode"] = draw.choice([None, None, None, *ScaleCalculationMode])
        if draw.random() < (0.9 if length == 16 else 0.03):
            cast["target_dtype"] = E2M1
    if cast["scaling_type"] is ScalingType.STATIC or draw.random() < 0.02:
        cast["static_quant_scale"] = draw.choice([0.25, 3.0])
    return cast


def draw_config(draw):
    """Draw the casts of the operands, by operand and direction, and the other options of a `Float8LinearConfig`."""
    casts = {}
    for operand in COLUMN:
        casts[operand, "row"] = draw_cast(draw, operand)
        casts[operand, "column"] = draw_cast(draw, operand) if draw.random() < 0.4 else None
    return casts, {
        "round_scales_to_power_of_2": draw.random() < 0.5,
        "backward": draw.choice(["float8"] * 8 + ["dequantized", "high_precision"]),
        "keep_float8_weight_for_backward": draw.random() < 0.3,
    }


def is_valid_cast(cast):
    scaling_type, dtype, mode = cast["scaling_type"], cast["target_dtype"], cast.get("scale_calculation_mode")
    is_static = scaling_type is ScalingType.STATIC
    if scaling_type in (ScalingType.DELAYED, ScalingType.STATIC) and cast["scaling_granularity"] is not TENSOR:
        return False
    if (rule := cast.get("scale_rule")) and not (
        mode is None
        and dtype in (None, E4M3)
        and (scaling_type is ScalingType.DYNAMIC or (is_static and SCALE_RULES[rule].takes_dequant_scales))
    ):
        return False
    if (dtype is E2M1) != (16 in cast.get("block_size", ())) or (dtype is E2M1 and mode is not None):
        return False
    return is_static or "static_quant_scale" not in cast


def is_valid(casts, options):
    """Return whether a `Float8LinearConfig` must accept these arguments, each cast of which is valid."""
    casts = {(name, direction): dict(cast or casts[name, "row"]) for (name, direction), cast in casts.items()}

    def is_on(*place):
        return casts[place]["scaling_type"] is not ScalingType.DISABLED

    for name in COLUMN:  # one dtype and, if it persists, one scale per operand
        pair = [casts[name, direction] for direction in ("row", "column") if is_on(name, direction)]
        for cast in pair:
            cast["target_dtype"] = cast["target_dtype"] or (E5M2 if name == "grad_output" else E4M3)
            if cast.get("scale_rule") and cast["target_dtype"] is not E4M3:
                return False
        scales = {(cast["scaling_type"], cast.get("static_quant_scale")) for cast in pair}
        is_dynamic = all(scaling_type is ScalingType.DYNAMIC for scaling_type, _ in scales)
        if len({cast["target_dtype"] for cast in pair}) > 1 or (len(scales) > 1 and not is_dynamic):
            return False
    if options["backward"] != "float8":  # neither grad_input nor grad_weight reads a cast
        for place in (("weight", "column"), ("input", "column"), ("grad_output", "row"), ("grad_output", "column")):
            casts[place] = {"scaling_type": ScalingType.DISABLED}
    for places in (
        (("input", "row"), ("weight", "row")),
        (("grad_output", "row"), ("weight", "column")),
        (("grad_output", "column"), ("input", "column")),
    ):
        on = [is_on(*place) for place in places]
        if any(on) and not (all(on) and {casts[place]["target_dtype"] for place in places} != {E5M2}):
            return False
    power_of_2, enabled = options["round_scales_to_power_of_2"], [place for place in casts if is_on(*place)]
    for name, direction in enabled:
        cast = casts[name, direction]
        is_square = len(set(cast.get("block_size", (1, 2)))) == 1
        has_power = math.log2(cast.get("static_quant_scale", 1)).is_integer()
        if (is_square and name != "weight") or (power_of_2 and not has_power):
            return False
        if cast.get("scale_calculation_mode") and not power_of_2:
            return False
    pair = [casts[place] for place in enabled if place[0] == "weight"]
    return len(pair) < 2 or pair[0] == pair[1] or not any("block_size" in cast for cast in pair)


def make_config(casts, options):
    fields = {
        f"cast_config_{name}" if direction == "row" else f"cast_config_{name}_for_{COLUMN[name]}": CastConfig(**cast)
        for (name, direction), cast in casts.items()
        if cast is not None
    }
    return Float8LinearConfig(**fields, **options)


def draw_matrix(draw, rows, columns):
    matrix = torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 6, (rows, 1)).float())
    matrix[draw.randrange(rows)] = 0
    if draw.random() < 0.5:
        matrix[:, draw.randrange(columns)] = 0
    return matrix


SEEDS = pytest.mark.parametrize("seed", [0, *at_night((seed,) for seed in range(1, 20))])


@SEEDS
def test_a_cast_is_refused_if_and_only_if_it_is_invalid(seed):
    draw = random.Random(seed)
    for _ in range(2000):
        cast = draw_cast(draw, draw.choice(list(COLUMN)))
        with contextlib.nullcontext() if is_valid_cast(cast) else pytest.raises(ValueError, match="expected"):
            CastConfig(**cast)


@SEEDS
def test_valid_configs_compute_what_the_reference_computes_and_others_are_refused(seed):
    draw, valid = random.Random(seed), 0
    while valid < 200:
        casts, options = draw_config(draw)
        if not all(is_valid_cast(cast) for cast in casts.values() if cast is not None):
            continue
        if not is_valid(casts, options):
            with pytest.raises(ValueError, match="expected"):
                make_config(casts, options)
            continue
        valid += 1
        check_results(draw, make_config(casts, options))


def check_results(draw, config):
    tokens, k, n = draw.choice(SHAPES)
    module = convert_to_float8_training(nn.Linear(k, n, bias=False), config=config)
    reference = ReferenceLinear(k, n, bias=False, config=config)
    module.load_state_dict({"weight": draw_matrix(draw, n, k)}, strict=False)
    reference.load_state_dict({"weight": module.weight})
    for _ in range(1 + config.has_persistent_scales):  # the first step of a delayed scale is dynamic
        input, grad_output = draw_matrix(draw, tokens, k), draw_matrix(draw, tokens, n)
        with cast_weights_once(module) if draw.random() < 0.3 else contextlib.nullcontext():
            results = compute_results(module, input, grad_output=grad_output)
        if any(cast.target_dtype is E2M1 and not cast.is_disabled for cast in config.casts.list_casts()):
            assert all(result.isfinite().all() for result in results)  # the reference has no casts of four bits
            continue
        expected = compute_results(reference, input, grad_output=grad_output)
        # The codes are equal. Two sums of the same products in float32, in two orders, round at most this often.
        least = lowest_sqnr_db(*[23] * 2 * max(tokens, k, n))
        for name, result, exact in zip(("output", "grad_input", "grad_weight"), results, expected, strict=True):
            assert torch.equal(result, exact) or sqnr_db(exact, result) > least, (name, config)
        sync_float8_amax_and_scale_history(module)
        reference.sync()
