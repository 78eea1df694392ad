"""Quantizes a high-precision tensor to float8 in plain PyTorch: amax -> scale -> saturated cast.

Every kernel must match this file bit for bit.

    amax          = max |hp|                    over the whole tensor (tensorwise), along one dim (rowwise), or over
                                                blocks (blockwise)
    quant_scale   = RN32(format.max / amax)     at most RN32(format.max / EPS); optionally rounded down to 2^k
    float8        = RNE8(clamp(RN32(float32(hp) * quant_scale), -format.max, format.max)); NaN for an infinite hp
    dequant_scale = RN32(1 / quant_scale)

RN32 rounds to the nearest float32 and RNE8 to the nearest float8, ties to even; subnormal numbers are kept.

Special amaxes:
    0 or an empty tensor   quant_scale = RN32(format.max / EPS), finite: zeros stay zeros
    below EPS              the same scale: values under EPS * smallest_subnormal / (2 * max) become zero
    inf                    quant_scale = 0, dequant_scale = inf: every result of the tensor (or row) is NaN
    NaN                    both scales NaN: every result of the tensor (or row) is NaN
So saturation never hides a non-finite value: it reaches the output, as it would in bfloat16. With the scale of an
earlier step or a static scale, the code of an infinite element is NaN.

A matrix [R, C] in blocks of r x c has ceil(R / r) x ceil(C / c) scales. The scales of a block of zeros are 1. For other
blocks, codes and scales are bit-identical to torchao's (prototype.blockwise_fp8_training). transformers' Fp8Quantize
multiplies 448 by a rounded 1 / amax, and DeepGEMM divides by RN32(amax / 448). Their scales differ by 1 ulp. Codes at a
rounding boundary may differ, too. When rounded to powers of two, scales agree unless 448 / amax is within 1 ulp of a
power.

[Note: one division, two formulas]
A scale must not depend on the device that computes it. float32 division is correctly rounded on a CPU, but not in
compiled GPU code. So only eager CPU code divides in float32; all other code divides in float64 and rounds to float32.
Both give the same bits: double rounding is innocuous for a quotient of float32 numbers, since 53 >= 2 * 24 + 2
(S. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes import e2m1, e8m0
from quaver.recipes.delayed_config import DelayedScalingConfig
from quaver.recipes.formats import E2M1, FLOAT8_FORMATS, FLOAT32_MANTISSA_MASK, HP_DTYPES, get_float32_bits, get_format
from quaver.recipes.scale_layout import SQUARE_BLOCKS, ScaleLayout, infer_layout
from quaver.recipes.scale_rules import SCALE_RULES, compute_scales_by_rule, divides, get_rule
from quaver.runtime.devices import is_cpu
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.tracing import assume_constant_result

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""The types of ordinary tensors: neither fake nor another subclass."""

EPS = 1e-12
"""The smallest amax that still moves the scale; the field's constant (torchao.float8, TransformerEngine)."""

_INT_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_ABS_MASK = {torch.int16: 0x7FFF, torch.int32: 0x7FFFFFFF}
_MIN_ELEMENTS_FOR_BITS = 8192  # elements; below, two more calls cost more than they save

# An eager operation takes a 0-dim tensor in half the time of a Python number. The tensors must be plain float32 even if
# this file is imported under a fake mode, a meta device or bfloat16 as the default dtype.
with without_dispatch_modes():
    _FORMAT_MAX = {
        dtype: torch.tensor(fmt.max, dtype=torch.float32, device="cpu") for dtype, fmt in FLOAT8_FORMATS.items()
    }
    _LARGEST_QUANT_SCALE = {
        dtype: torch.tensor(fmt.max / EPS, dtype=torch.float32, device="cpu") for dtype, fmt in FLOAT8_FORMATS.items()
    }


class PersistentScale(NamedTuple):
    """The delayed or static scale of one operand, as views of the state that keeps it from step to step."""

    quant_scale: Tensor
    """float32 (). A scale <= 0 or NaN means unknown: the operand is then scaled by its own amax."""
    amax_buffer: Tensor | None
    """float32 [2]: the largest amax of any cast since the last sync, and the most elements that saturated in one cast;
    -1 before the first cast. None where nothing is recorded."""
    is_known: Tensor
    """bool () on the CPU: whether quant_scale is above 0. The host reads it without waiting for the device."""
    is_known_to_compiler: bool = False
    """Whether the host has read that quant_scale is above 0; code compiled for a GPU guards on it."""
    elements: tuple[Tensor, ...] | None = None
    """The elements of amax_buffer as two tensors (): compiled code updates them in fewer kernels."""


class PersistentScales(NamedTuple):
    """The persistent scales of a linear's operands; None for an operand that is scaled dynamically."""

    input: PersistentScale | None
    weight: PersistentScale | None
    grad_output: PersistentScale | None


NO_PERSISTENT_SCALES = PersistentScales(None, None, None)


def runs_eagerly_on_cpu(tensor: Tensor) -> bool:
    """Return whether operations on `tensor` run at once on a CPU: it is not traced, not fake, and not a subclass."""
    return is_cpu(tensor) and type(tensor) in PLAIN_TYPES and not torch.compiler.is_dynamo_compiling()


def check_hp(hp: Tensor) -> None:
    """Raise ValueError unless `hp` has a high-precision dtype. Fake kernels call it too, so that tracing raises."""
    if hp.dtype not in HP_DTYPES:
        raise ValueError(f"expected a tensor of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype}")


def compute_amax(hp: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude of `hp`, of all elements or along `dim`.

    Args:
        hp: float32, bfloat16 or float16, any shape and strides.
        dim: None for one value (tensorwise), or the dim to reduce (rowwise).
    Returns:
        Exact, in hp's dtype: shape () for None, else hp's shape with `dim` reduced to 1. NaN where any value is NaN,
        0 for an empty tensor.
    Raises:
        ValueError: hp does not have a high-precision dtype.
    """
    check_hp(hp)
    if hp.numel() == 0:
        shape = () if dim is None else [1 if i == dim % hp.dim() else n for i, n in enumerate(hp.shape)]
        return hp.new_zeros(shape)
    if runs_eagerly_on_cpu(hp) and hp.numel() >= _MIN_ELEMENTS_FOR_BITS:
        ints = _INT_DTYPE[hp.dtype]  # bits order like magnitudes, with NaNs on top; integers are twice as fast on a CPU
        magnitude = hp.view(ints).bitwise_and(_ABS_MASK[ints])
    else:
        magnitude = hp.abs()
    largest = magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=True)
    return largest if largest.dtype is hp.dtype else largest.view(hp.dtype)


def amax_to_quant_scale(amax: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False) -> Tensor:
    """Return RN32(format.max / amax), at most RN32(format.max / EPS), for amaxes of any shape and hp dtype.

    `power_of_2`: round it down to a power of two, by clearing its mantissa.
    """
    if runs_eagerly_on_cpu(amax):
        scale = torch.div(_FORMAT_MAX[float8_dtype], amax.float()).clamp_max_(_LARGEST_QUANT_SCALE[float8_dtype])
    elif power_of_2:
        return _compute_power_of_2_scale(amax.float(), float8_dtype)
    else:  # [Note: one division, two formulas]
        # Clamp after rounding. Torch 2.11's compiler removes a float64 -> float32 -> float64 round trip without an
        # operation in between (`pointless_convert` in its joint graph passes); to_dequant_scale would not be rounded.
        largest, largest_quant_scale = _get_scale_constants(float8_dtype)
        scale = (largest / amax.double()).float().clamp(max=largest_quant_scale)
    return round_down_to_power_of_2(scale) if power_of_2 else scale


def _compute_power_of_2_scale(amax: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Compute `amax_to_quant_scale` with `power_of_2` in integers; a fused float64 division is 40 instructions.

    2^k <= largest / amax where the bits of 2^k * amax are at most the bits of `largest`. Rounding the quotient to
    float32 first gives the same power of two, because `largest` has a mantissa of 1.75.
    """
    largest_bits, largest_exponent = _get_power_of_2_constants(float8_dtype)
    exponent = ((largest_bits - amax.view(torch.int32)) >> 23).clamp(max=largest_exponent)
    scale = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(amax < torch.inf, scale, torch.where(amax == torch.inf, 0.0, amax))


# [Note: floats under dynamic shapes] With dynamic=True Dynamo turns a module's float constant into a graph input, which
# it cannot pass to an autograd function's graph (torch 2.13). Functions that return constants run at trace time.


@assume_constant_result
def _get_scale_constants(float8_dtype: torch.dtype) -> tuple[float, float]:
    """Return the format's largest number, and the largest quant_scale."""
    largest = get_format(float8_dtype).max
    return largest, largest / EPS


@assume_constant_result
def _get_power_of_2_constants(float8_dtype: torch.dtype) -> tuple[int, int]:
    """Return the bits of the format's largest number, and the exponent of the largest power-of-two quant_scale."""
    largest = get_format(float8_dtype).max
    return get_float32_bits(largest), math.frexp(largest / EPS)[1] - 1


def round_down_to_power_of_2(scale: Tensor) -> Tensor:
    """Clear the mantissas of positive float32 numbers; NaN stays NaN."""
    rounded = scale.view(torch.int32).bitwise_and(~FLOAT32_MANTISSA_MASK).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)  # clearing the mantissa of a NaN would give inf


def compute_persistent_scale(
    amax: Tensor, format_max: Tensor, config: DelayedScalingConfig, power_of_2: bool
) -> Tensor:
    """Return the quant_scale for an expected `amax`, float32 of its shape, valid for amax > 0.

    This is TransformerEngine's formula, with the largest float32 if the quotient overflows. The division runs in
    float64 to be bit-identical on every device ([Note: one division, two formulas]).
    """
    scale = (format_max.double() / config.headroom / amax.double()).float() / 2.0**config.margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return round_down_to_power_of_2(scale) if power_of_2 else scale


def to_dequant_scale(quant_scale: Tensor) -> Tensor:
    """Return RN32(1 / quant_scale), float32 of the same shape. Exact for powers of two."""
    if runs_eagerly_on_cpu(quant_scale):
        return quant_scale.reciprocal()
    return (1.0 / quant_scale.double()).float()  # [Note: one division, two formulas]


class CastScales(NamedTuple):
    """The scales of a cast, of the shape of the amaxes. Under quaver's rule dequant is RN32(1 / quant)."""

    quant: Tensor
    """float32."""
    dequant: Tensor
    """float32; e4m3 if there is an outer scale."""
    outer: Tensor | None = None
    """A second level of scales, float32 (), which multiplies dequant (e2m1.py); None for float8."""


def compute_scales(
    amax: Tensor, float8_dtype: torch.dtype, power_of_2: bool, rule: str = "", *, is_blockwise: bool = False
) -> CastScales:
    """Compute the scales that map amaxes of any shape to the largest number of `float8_dtype`.

    Args:
        amax: in the dtype of its tensor, because some rules of scale_rules.py round to it.
        float8_dtype: a float8 dtype, or e2m1.
        power_of_2: round quant_scale down to a power of two. Ignored where `rule` decides.
        rule: the name of a rule in scale_rules.py; for blocks also "rceil" or "floor"; "" for quaver's rule.
        is_blockwise: the amaxes are of blocks. quaver's rule then gives a block of zeros a scale of 1.
    """
    if float8_dtype is E2M1.dtype:
        return CastScales(*e2m1.compute_block_scales(amax))
    if rule in SCALE_RULES:
        return CastScales(*compute_scales_by_rule(amax, float8_dtype, rule))
    if rule:
        return CastScales(*e8m0.compute_scales(amax, float8_dtype, rule))
    quant = amax_to_quant_scale(amax, float8_dtype, power_of_2=power_of_2)
    if is_blockwise:
        quant = quant.masked_fill_(amax == 0, 1.0)
    return CastScales(quant, to_dequant_scale(quant))


def compute_scales_of_parts(
    amaxes: Tensor, lengths: Sequence[int], float8_dtype: torch.dtype, power_of_2: bool, rule: str, is_blockwise: bool
) -> list[CastScales]:
    """Run `compute_scales` for several tensors, whose amaxes are parts of a vector; in one call except for e2m1."""
    if float8_dtype is E2M1.dtype:
        parts = amaxes.split(list(lengths))
        return [compute_scales(part, float8_dtype, power_of_2, rule, is_blockwise=is_blockwise) for part in parts]
    quant, dequant, _ = compute_scales(amaxes, float8_dtype, power_of_2, rule, is_blockwise=is_blockwise)
    return [CastScales(*pair) for pair in zip(quant.split(list(lengths)), dequant.split(list(lengths)), strict=True)]


def choose_factor(scales: CastScales, rule: str) -> Tensor:
    """Return the scale that `cast_to_float8` applies under a rule: the dequant_scale if the rule divides by it."""
    return scales.dequant if divides(rule) else scales.quant


def cast_to_float8(
    hp: Tensor, factor: Tensor, float8_dtype: torch.dtype, *, is_own_scale: bool = False, rule: str = ""
) -> Tensor:
    """Scale and cast. Overflows saturate to the largest finite number; inf and NaN become NaN.

    Args:
        hp: float32, bfloat16 or float16, any shape.
        factor: the scale that `choose_factor` returns for `rule`. float32, broadcastable to hp: shape () or hp's shape
            with 1s.
        float8_dtype: the dtype of the result.
        is_own_scale: `factor` was computed from the amax of the elements that it scales. The search for infs is then
            skipped, because an inf makes its quant_scale 0 and its product NaN. Results are the same.
        rule: as for `compute_scales`. Some rules divide by `factor`, the others multiply by it.
    Returns:
        float8, hp's shape, and hp's strides if they are dense.
    """
    if divides(rule):
        return _saturate_(_replace_inf_(apply_dequant_scale(hp, factor, rule), hp), float8_dtype)
    return _saturate_(apply_quant_scale(hp, factor, is_own_scale=is_own_scale), float8_dtype)


def apply_dequant_scale(hp: Tensor, dequant_scale: Tensor, rule: str) -> Tensor:
    """Divide by the scale in float32, under a rule that divides."""
    is_rounded_once = runs_eagerly_on_cpu(hp)  # [Note: one division, two formulas]
    quotient = hp.float() / dequant_scale if is_rounded_once else (hp.double() / dequant_scale.double()).float()
    if not get_rule(rule).in_hp_dtype:
        return quotient
    quotient = quotient.to(hp.dtype).float()
    return torch.where(quotient == 0, 0.0, quotient)


def apply_quant_scale(hp: Tensor, quant_scale: Tensor, *, is_own_scale: bool = False) -> Tensor:
    """Return the float32 products that `cast_to_float8` saturates, NaN for an infinite hp. Arguments as there."""
    scaled = hp * quant_scale if hp.dtype is torch.float32 else hp.float().mul_(quant_scale)
    return scaled if is_own_scale else _replace_inf_(scaled, hp)


def _replace_inf_(scaled: Tensor, hp: Tensor) -> Tensor:
    """Replace the elements of `scaled` by NaN where `hp` is infinite."""
    if torch.compiler.is_dynamo_compiling():  # Inductor merges equal operations only if no argument is NaN
        return scaled - (hp - hp).abs()
    return scaled.masked_fill_(hp.isinf(), torch.nan)


def _saturate_(scaled: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Clamp and cast. torch's cast of an overflowing value changed between releases (NaN, inf or the maximum)."""
    largest, _ = _get_scale_constants(float8_dtype)
    return scaled.clamp_(-largest, largest).to(float8_dtype)


def cast_with_persistent_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast `hp` with a scale from an earlier step (delayed or static), and measure how well that scale fits.

    Args:
        hp: float32, bfloat16 or float16, any shape.
        quant_scale: float32 (). A scale <= 0 or NaN means unknown: `hp` is then scaled by its own amax.
        float8_dtype: the dtype of the codes.
        power_of_2: round a scale computed from hp down to a power of two. A given scale is not rounded.
    Returns:
        float8 of hp's shape; the float32 quant_scale () that was used, and its dequant_scale; and float32 [2]: the
        amax of hp, and the number of saturated elements (exact up to 2^24). An element saturates where its clamping
        error exceeds the largest rounding error.
    """
    fmt = FLOAT8_FORMATS[float8_dtype]
    amax = compute_amax(hp).float()
    computed = amax_to_quant_scale(amax, float8_dtype, power_of_2=power_of_2)
    quant = torch.where(quant_scale > 0, quant_scale, computed)
    scaled = apply_quant_scale(hp, quant)
    saturated = (scaled.abs() > fmt.saturates_above).sum(dtype=torch.float32)
    return _saturate_(scaled, float8_dtype), quant, to_dequant_scale(quant), torch.stack([amax, saturated])


def dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None = None, *, power_of_2: bool = False, rule: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `hp` with a scale computed from its amax; see `compute_amax` and `compute_scales` for the arguments.

    Returns:
        The float8 tensor, and float32 quant_scale and dequant_scale (shape () or hp's shape with `dim` reduced to 1).
    """
    scales = compute_scales(compute_amax(hp, dim), float8_dtype, power_of_2, rule)
    factor = choose_factor(scales, rule)
    codes = cast_to_float8(hp, factor, float8_dtype, is_own_scale=True, rule=rule)
    return codes, scales.quant, scales.dequant


def compute_block_amax(hp: Tensor, layout: ScaleLayout = SQUARE_BLOCKS) -> Tensor:
    """Return the largest magnitude in each block of `hp` [R, C], in hp's dtype and in the shape of the scales.

    Raises:
        ValueError: hp is not a matrix, or does not have a high-precision dtype.
    """
    if hp.dtype not in HP_DTYPES or hp.dim() != 2:
        expected = f"expected a matrix of {', '.join(map(str, HP_DTYPES))}"
        raise ValueError(f"{expected}, got {hp.dtype} of {list(hp.shape)}")
    rows, columns = layout.rows, layout.columns
    magnitude = hp.abs()
    missing = -hp.shape[0] % rows, -hp.shape[1] % columns
    if any(missing):
        magnitude = torch.nn.functional.pad(magnitude, (0, missing[1], 0, missing[0]))
    counts = layout.get_scale_shape(hp.shape[0], hp.shape[1])
    return magnitude.view(counts[0], rows, counts[1], columns).amax((1, 3)) if hp.numel() else hp.new_zeros(counts)


def dynamic_cast_blocks(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    power_of_2: bool = False,
    block_size: Sequence[int] = SQUARE_BLOCKS,
    rule: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix in blocks, each with a scale computed from its amax.

    Args:
        hp: [R, C], float32, bfloat16 or float16, any strides.
        float8_dtype, power_of_2, rule: see `compute_scales`.
        block_size: rows and columns of a block.
    Returns:
        float8 [R, C], contiguous; float32 quant_scale and dequant_scale [ceil(R / rows), ceil(C / columns)].
    """
    layout = ScaleLayout(*block_size)
    scales = compute_scales(compute_block_amax(hp, layout), float8_dtype, power_of_2, rule, is_blockwise=True)
    factor = choose_factor(scales, rule)
    return cast_blocks(hp, factor, float8_dtype, layout, is_own_scale=True, rule=rule), scales.quant, scales.dequant


def cast_blocks(
    hp: Tensor,
    factor: Tensor,
    float8_dtype: torch.dtype,
    layout: ScaleLayout,
    is_own_scale: bool = False,
    rule: str = "",
) -> Tensor:
    """Run `cast_to_float8` on a matrix [R, C] with one factor per block. The result is contiguous."""
    if divides(rule):
        element_scales = _multiply_blocks_(torch.ones_like(hp, dtype=torch.float32), factor, layout)
        return cast_to_float8(hp, element_scales, float8_dtype, rule=rule).contiguous()
    scaled = hp.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _multiply_blocks_(scaled, factor, layout)
    if float8_dtype is E2M1.dtype:
        return e2m1.pack(scaled)
    return _saturate_(scaled if is_own_scale else _replace_inf_(scaled, hp), float8_dtype)


@assume_constant_result
def compute_saturation_threshold(float8_dtype: torch.dtype) -> float:
    """Return `Float8Format.saturates_above` of a dtype."""
    return get_format(float8_dtype).saturates_above


def multiply_scale_(wide: Tensor, scale: Tensor, layout: ScaleLayout | None = None) -> Tensor:
    """Multiply a matrix [R, C] in place by its scale. Without a layout, `infer_layout` infers it from the shapes."""
    layout = layout or infer_layout(scale, wide.shape)
    return wide.mul_(scale) if scale.dim() == 0 else _multiply_blocks_(wide, scale, layout)


def _multiply_blocks_(wide: Tensor, scale: Tensor, layout: ScaleLayout) -> Tensor:
    if all(count in (1, elements) for count, elements in zip(scale.shape, wide.shape, strict=True)):
        return wide.mul_(scale)
    block_size = layout.get_block_shape(wide.shape)
    for rows, scale_rows, height in _split_blocks(wide.shape[0], block_size[0]):
        for columns, scale_columns, width in _split_blocks(wide.shape[1], block_size[1]):
            blocks = wide[rows, columns].unflatten(0, (-1, height)).unflatten(2, (-1, width))
            blocks.mul_(scale[scale_rows, None, scale_columns, None])
    return wide


def _split_blocks(elements: int, length: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the elements, the scales and the length of the full blocks of a dim, then of a shorter last block."""
    full = elements // length
    if full:
        yield slice(0, full * length), slice(0, full), length
    if elements % length:
        yield slice(full * length, elements), slice(full, full + 1), elements % length


def dequantize(
    codes: Tensor,
    dequant_scale: Tensor,
    hp_dtype: torch.dtype = torch.float32,
    layout: ScaleLayout | None = None,
    outer_scale: Tensor | None = None,
) -> Tensor:
    """Return RN(RN32(codes * dequant_scale)), the values of a float8 or e2m1 matrix [R, C], in high precision.

    Args:
        codes: float8 [R, C], or e2m1 [R, C / 2].
        dequant_scale: of the shape that `layout` gives.
        hp_dtype: the dtype of the result.
        layout: which elements share a scale; None to infer it from the shapes (`infer_layout`).
        outer_scale: float32 (), a factor of the float32 values; None in formats with one level of scales.
    """
    codes = e2m1.unpack(codes) if codes.dtype is E2M1.dtype else codes
    wide = codes.to(torch.float32, memory_format=torch.contiguous_format)
    values = multiply_scale_(wide, dequant_scale.float(), layout)
    return (values if outer_scale is None else values.mul_(outer_scale)).to(hp_dtype)
