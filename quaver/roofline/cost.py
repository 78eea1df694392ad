"""Predicts the time of one linear, forward and backward, from FLOPs, bytes and launches.

A linear of M tokens, K inputs and N outputs is three matmuls, forward and backward. Float8 adds casts:

    matmul [r, c] x [c, s]    max(2 r c s / FLOP/s, (b (r c + c s) + 2 r s) / bandwidth)    b = 1 in float8, else 2
    casts of an operand       bytes per element * elements / bandwidth
    launches                  4 us for each kernel

    bytes per element of the casts of a bfloat16 operand, read once per pass, one byte written per layout:

    dynamic, tensorwise       both layouts 6: read for amax (2); read, write both (4)       one layout 5
    dynamic, rowwise          both layouts 6: read for both amaxes (2); read, write both    one layout 3: a row stays
    delayed, static           both layouts 4: read, write both                              one layout 3   in registers
    dynamic, blocks           both layouts 4: blocks stay in registers      square blocks, or one layout 3
    again, scale known        one layout 3

These are lower bounds for kernels that keep no tensor on the chip between passes. A rowwise cast for column codes
alone counts as 3 too, although quaver's kernel moves 5 (kernels/triton_cast.py). Input and grad_output get both layouts
at once. Backward casts the weight again (one layout, then one more), unless its float8 codes are saved.

A GPU that does not multiply float8 with a recipe's scales widens the codes to bfloat16 (1 byte read and 2 written for
each operand of each matmul) and multiplies in bfloat16. The rate of native matmuls depends on their scales
(quaver/roofline/scaled_matmul.py). With backward="dequantized" the row codes of input and weight are widened in the
same way, after the weight is cast again.

Not included:
    fusion of casts with other kernels, by which a compiler can save a read
    the host's time, which counts if it is slower than the GPU
    L2 cache, and power limits in long runs
    communication
    the state of delayed scaling, updated once a step for the whole model
    biases, and padding to 16
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from quaver.experts.gpu_gemm import GROUPED_MM_CAPABILITIES
from quaver.kernels.native_mm import ScaleKind
from quaver.recipes.config import CastConfig, Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.linear_casts import MATMULS, OperandCasts
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import predict_matmul_seconds, predict_move_seconds
from quaver.roofline.scaled_matmul import find_scale_kinds, get_scales_share

KERNEL_LAUNCH_S = 4e-6
"""The time from the start of an empty kernel to the start of the next. torchao's roofline has 2 us, the time of a
kernel for one element on an H100; another 2 us is assumed for the gap between kernels."""


class CastCosts(NamedTuple):
    """The cost of the casts of one operand: bytes moved per element, and kernels launched."""

    bytes_per_element: float
    kernels: float


NO_CASTS = CastCosts(0, 0)
_WIDENING = CastCosts(3, 1)


@dataclass(frozen=True)
class LinearTime:
    """The seconds of one forward and backward, in parts that add up to `total_s`. `launches_s` has all launches."""

    output_s: float
    grad_input_s: float
    grad_weight_s: float
    input_casts_s: float
    weight_casts_s: float
    grad_output_casts_s: float
    widening_s: float
    launches_s: float

    @property
    def total_s(self) -> float:
        matmuls = self.output_s + self.grad_input_s + self.grad_weight_s
        casts = self.input_casts_s + self.weight_casts_s + self.grad_output_casts_s
        return matmuls + casts + self.widening_s + self.launches_s


@dataclass(frozen=True)
class LinearCost:
    """The prediction for one linear in bfloat16 and in float8."""

    bfloat16: LinearTime
    float8: LinearTime

    @property
    def speedup(self) -> float:
        """bfloat16's time over float8's: above 1 if float8 is faster."""
        return self.bfloat16.total_s / self.float8.total_s


def predict_linear_cost(
    tokens: int,
    in_features: int,
    out_features: int,
    recipe: Float8LinearRecipeName | str,
    spec: DeviceSpec,
    *,
    microbatches: int | None = None,
    input_readers: int = 1,
    by_shape: bool = False,
    shares: Mapping[str, float] | None = None,
) -> LinearCost:
    """Predict the time of a linear without bias, in bfloat16 and in float8.

    Args:
        tokens, in_features, out_features: M, K and N.
        recipe: a recipe's name.
        spec: the device.
        microbatches: the number of microbatches that share the weight's casts, made for both matmuls at once
            (`cast_weights_once`; 1 is also `keep_float8_weight_for_backward`). None: each forward casts the weight,
            and its backward casts it again.
        input_readers: the number of linears that share the input, its casts and their cost (3 for q, k and v).
        by_shape: whether small and ragged matmuls are slower (quaver/roofline/matmul.py). Otherwise all have the best
            rate, and a larger linear never gains less.
        shares: by name in MATMULS, a float8 matmul's share of the rate with one scale per operand, by default 1. None
            for the shares of torch's kernels (quaver/roofline/scaled_matmul.py).
    Raises:
        ValueError: an unknown recipe, or a number below 1.
    """
    recipe = canonicalize_recipe(recipe)
    numbers = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
    numbers |= {"microbatches": 1 if microbatches is None else microbatches, "input_readers": input_readers}
    for name, number in numbers.items():
        if not isinstance(number, Real) or number < 1:
            raise ValueError(f"{name}: expected 1 or more, got {number!r}")
    casts = compute_cast_costs(recipe, microbatches=microbatches, input_readers=input_readers)
    kinds = find_scale_kinds(recipe)
    shares = {name: get_scales_share(kind, spec) for name, kind in kinds.items()} if shares is None else shares
    shape, in_float8 = (tokens, in_features, out_features), tuple(name in kinds for name in MATMULS)
    native = not find_unsupported_scales(spec, recipe)
    return LinearCost(
        _predict_linear_time(shape, (NO_CASTS,) * 3, (False,) * 3, {}, spec, native=False, by_shape=by_shape),
        _predict_linear_time(shape, casts, in_float8, shares, spec, native=native, by_shape=by_shape),
    )


@functools.cache
def compute_cast_costs(
    recipe: Float8LinearRecipeName | str, *, microbatches: int | None = None, input_readers: int = 1
) -> tuple[CastCosts, CastCosts, CastCosts]:
    """Compute the cost of the casts of (input, weight, grad_output) in one forward and backward.

    Arguments as in `predict_linear_cost`.
    """
    casts = Float8LinearConfig.from_recipe_name(recipe).casts
    input = _divide(compute_operand_cast_costs(casts.input), input_readers)
    weight = _divide(compute_operand_cast_costs(casts.weight, is_repeated=microbatches is None), microbatches or 1)
    if casts.weight.is_dequantized:
        input, weight = (
            CastCosts(operand.bytes_per_element + _WIDENING.bytes_per_element, operand.kernels + _WIDENING.kernels)
            for operand in (input, weight)
        )
    return input, weight, compute_operand_cast_costs(casts.grad_output)


def compute_operand_cast_costs(casts: OperandCasts, *, is_repeated: bool = False) -> CastCosts:
    """Compute the cost of an operand's casts for its two matmuls: made at once, or `is_repeated` for the second one."""
    row, column = casts.row, casts.column
    in_float8 = [cast for cast in (row, column) if not cast.is_disabled]
    if not in_float8:
        return NO_CASTS
    for cast in in_float8:
        cast.require_layout("roofline")
    if len(in_float8) == 1:
        once, times = _compute_layout_costs(in_float8[0]), 2 if is_repeated and casts.is_dequantized else 1
        return CastCosts(times * once.bytes_per_element, times * once.kernels)
    if row.is_blockwise:
        return CastCosts(4, 1) if row.depends_on_direction else CastCosts(3, 1)
    is_mixed, first = row.is_rowwise is not column.is_rowwise, _compute_layout_costs(row)
    if is_mixed or is_repeated:
        # The scale of a tensor after its rows is the smallest of theirs: one kernel.
        smallest_scale = 1 if is_mixed and row.is_rowwise else 0
        return CastCosts(first.bytes_per_element + 3, first.kernels + smallest_scale + 1)
    return CastCosts(4, 2) if row.is_persistent else CastCosts(6, 2)


def _compute_layout_costs(cast: CastConfig) -> CastCosts:
    if cast.is_rowwise or cast.is_blockwise:
        return CastCosts(3, 1)
    # With a known scale the first kernel returns immediately.
    return CastCosts(3, 2) if cast.is_persistent else CastCosts(5, 2)


def _divide(casts: CastCosts, sharers: int) -> CastCosts:
    return CastCosts(casts.bytes_per_element / sharers, casts.kernels / sharers)


def find_unsupported_scales(spec: DeviceSpec, recipe: Float8LinearRecipeName | str) -> set[ScaleKind | None]:
    """Find the scales of a recipe's float8 matmuls that `spec` does not multiply; None for scales of no hardware."""
    kinds = set(find_scale_kinds(canonicalize_recipe(recipe)).values())
    return {kind for kind in kinds if kind is None or explain_native_obstacle(spec, kind)}


def explain_native_obstacle(spec: DeviceSpec, kind: ScaleKind) -> str | None:
    """Return why `spec` does not multiply float8 with this kind of scales, or None if it does."""
    if spec.float8_tflops is None:
        return f"{spec.name} does not multiply float8"
    if kind is ScaleKind.GROUPS and (spec.compute_capability or 0) // 10 not in GROUPED_MM_CAPABILITIES:
        return f"no grouped matmul of {spec.name} supports scales"
    if kind.block_length not in (0, spec.block_length):
        return f"no matmul of {spec.name} supports {kind.value} scales"
    return None


def _predict_linear_time(
    shape: tuple[int, int, int],
    casts: tuple[CastCosts, ...],
    in_float8: tuple[bool, ...],
    shares: Mapping[str, float],
    spec: DeviceSpec,
    *,
    native: bool,
    by_shape: bool,
) -> LinearTime:
    """Predict the time of one linear with the `casts` of input, weight and grad_output; see `predict_linear_cost`.

    `in_float8`: which of output, grad_input and grad_weight are in float8. `native`: whether the hardware does them.
    """
    m, k, n = shape
    elements = (m * k, k * n, m * n)
    shapes = zip(((m, k, n), (m, n, k), (n, m, k)), MATMULS, in_float8, strict=True)
    matmuls = [
        predict_matmul_seconds(
            *sizes, spec, in_float8=float8 and native, by_shape=by_shape, scales_share=shares.get(name, 1.0)
        )
        for sizes, name, float8 in shapes
    ]
    cast_times = [
        predict_move_seconds(cast.bytes_per_element * size, spec) for cast, size in zip(casts, elements, strict=True)
    ]
    # output reads input and weight, grad_input grad_output and weight, grad_weight grad_output and input.
    operands = ((0, 1), (2, 1), (2, 0))
    widened = [] if native else [i for pair, float8 in zip(operands, in_float8, strict=True) if float8 for i in pair]
    widening_s = predict_move_seconds(sum(_WIDENING.bytes_per_element * elements[i] for i in widened), spec)
    kernels = len(matmuls) + sum(cast.kernels for cast in casts) + _WIDENING.kernels * len(widened)
    output_s, grad_input_s, grad_weight_s = matmuls
    input_s, weight_s, grad_output_s = cast_times
    launches_s = kernels * KERNEL_LAUNCH_S
    return LinearTime(output_s, grad_input_s, grad_weight_s, input_s, weight_s, grad_output_s, widening_s, launches_s)
