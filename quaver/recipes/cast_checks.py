"""Refuses casts that no matmul of a linear can run together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quaver.recipes.cast_config import CastConfig
from quaver.recipes.field_checks import check_field
from quaver.recipes.formats import E2M1, E5M2
from quaver.recipes.linear_casts import MATMULS, LinearCasts, OperandCasts, name_cast
from quaver.recipes.scale_rules import get_rule


def check_casts(casts: LinearCasts, *, power_of_2: bool, gathers_in_float8: bool, backward: str) -> None:
    """Check casts, with `backward` applied, under the options of a `Float8LinearConfig`.

    Raises:
        ValueError: a matmul cannot run, or the weight cannot be gathered in float8.
        NotImplementedError: the weight is to be gathered in float8, and its casts have no known layout.
    """
    for matmul in MATMULS:
        _check_matmul(matmul, casts)
    _check_blocks(casts, power_of_2)
    if power_of_2:
        _check_powers_of_2(casts)
    if gathers_in_float8:
        _check_all_gather(casts.weight, backward)


def has_powers_of_2(cast: CastConfig, power_of_2: bool) -> bool:
    """Return whether every scale of a cast is a power of two."""
    if cast.target_dtype is E2M1.dtype:
        return False
    return power_of_2 if cast.scale_rule is None else get_rule(cast.scale_rule).rounds_up


def _check_matmul(matmul: str, casts: LinearCasts) -> None:
    (left_name, left_cast), (right_name, right_cast) = (
        (name_cast(*operand), casts.get(*operand)) for operand in MATMULS[matmul]
    )
    if left_cast.is_disabled != right_cast.is_disabled:
        fp8, hp = (left_name, right_name) if right_cast.is_disabled else (right_name, left_name)
        raise ValueError(
            f"{matmul}: expected two operands in float8, or two in high precision, got {fp8} in float8 and {hp} in "
            "high precision"
        )
    if not left_cast.is_disabled and left_cast.target_dtype == right_cast.target_dtype == E5M2.dtype:
        raise ValueError(
            f"{matmul}: expected {left_name} or {right_name} in e4m3, got two in e5m2, which no hardware multiplies"
        )


def _check_blocks(casts: LinearCasts, power_of_2: bool) -> None:
    for name, cast in _iter_casts(casts):
        if cast.is_blockwise and not cast.depends_on_direction and not name.startswith("weight"):
            raise ValueError(
                f"{name}: square blocks are for weights, since no hardware multiplies two; expected tensorwise, "
                f"rowwise or blocks of (1, 128) or (1, 32), got {cast}"
            )
        if cast.scale_calculation_mode is not None and not power_of_2:
            raise ValueError(
                f"{name}: E8M0 scales are powers of two; expected round_scales_to_power_of_2=True, got False"
            )
    weight = casts.weight
    is_blockwise = weight.row.is_blockwise or weight.column.is_blockwise
    if is_blockwise and weight.is_float8 and weight.row != weight.column_source:
        raise ValueError(
            f"weight: expected blocks of one size for both of its matmuls, got {weight.row} for output, "
            f"{weight.column} for grad_input"
        )


def _check_powers_of_2(casts: LinearCasts) -> None:
    expected = "a static_quant_scale that is a power of two, since round_scales_to_power_of_2 is on"
    for name, cast in _iter_casts(casts):
        scale = cast.static_quant_scale
        check_field(scale is None or math.frexp(scale)[0] == 0.5, f"cast_config_{name}", expected, scale)


def _check_all_gather(weight: OperandCasts, backward: str) -> None:
    has_one_cast = weight.has_equal_casts or weight.is_dequantized
    for cast in weight.directions:
        cast.require_layout("enable_fsdp_float8_all_gather", allows_packed=True)
        check_field(
            cast.scale_rule is None or (has_one_cast and not get_rule(cast.scale_rule).divides),
            "enable_fsdp_float8_all_gather",
            "False with a scale_rule that divides by the weight's scales or applies to only one of its matmuls",
            True,
        )
    if not weight.is_float8:
        raise ValueError(
            "enable_fsdp_float8_all_gather: expected the weight in float8 in both of its matmuls, got output "
            f"{weight.row}, grad_input {weight.column}; gather in high precision"
            + (', or use backward="dequantized"' if backward == "high_precision" else "")
        )


def _iter_casts(casts: LinearCasts) -> Iterator[tuple[str, CastConfig]]:
    for operand in casts._fields:
        for direction in ("row", "column"):
            yield name_cast(operand, direction), casts.get(operand, direction)
