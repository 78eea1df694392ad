"""From a high-precision tensor to float8: amax -> scale -> saturated cast, in plain PyTorch.

This file is the oracle that every kernel must match bit for bit.

    amax          = max |hp|                    over the whole tensor (tensorwise), along one dim (rowwise), or over
                                                blocks (blockwise)
    quant_scale   = RN32(format.max / amax)     at most RN32(format.max / EPS); optionally rounded down to 2^k
    float8        = RNE8(clamp(RN32(float32(hp) * quant_scale), -format.max, format.max)); NaN for an infinite hp
    dequant_scale = RN32(1 / quant_scale)

RN32 is the correctly rounded float32 result, RNE8 round to nearest, ties to even, subnormals kept.

What the unusual amaxes do:
    0 or an empty tensor   quant_scale = RN32(format.max / EPS), finite: zeros stay zeros
    below EPS              the same scale: values under EPS * smallest_subnormal / (2 * max) become zero
    inf                    quant_scale = 0, dequant_scale = inf: every result of the tensor (or row) is NaN
    NaN                    both scales NaN: every result of the tensor (or row) is NaN
so a non-finite value is never hidden by saturation: it reaches the output, as it would in bfloat16. Under a scale that
is not of this amax (an earlier step's, a static one) the infinite element itself becomes NaN.

Blocks tile a matrix from its first element. The last row and column of blocks may be smaller, so a matrix [R, C] in
blocks of r x c has ceil(R / r) x ceil(C / c) scales. The scales of a block of zeros are 1. For other blocks, codes
and scales are torchao's (prototype.blockwise_fp8_training) to the bit. transformers' Fp8Quantize multiplies 448 by a
rounded 1 / amax, DeepGEMM divides by RN32(amax / 448): their scales differ by 1 ulp, and with them a code at a rounding
boundary. Rounded to powers of two, all are the same but where 448 / amax is within 1 ulp of one.

The E8M0 scales of MXFP8 are powers of two from 2^-127 to 2^127 or NaN, stored as the biased exponent. No amax is too
small for them (EPS has no part):

    RCEIL    dequant_scale = the smallest power of two that is not below RN32(amax / format.max)
    FLOOR    dequant_scale = 2^(floor(log2 amax) - floor(log2 format.max)), so that elements may saturate
    both     0 and amaxes below the range: 2^-127; inf and NaN: NaN, and every result of the block is NaN

[Note: one division, two formulas]
The scale must not depend on the device that computes it. A CPU divides float32 correctly rounded; compiled GPU code
does not. So all but eager CPU code divides in float64 and rounds to float32. The two agree in every bit: double
rounding is innocuous for a quotient of float32 numbers, since 53 >= 2 * 24 + 2 (S. Figueroa, "When is double rounding
innocuous?", SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes import e2m1
from quaver.recipes.formats import E2M1, FORMATS, HP_DTYPES, format_of
from quaver.recipes.scale_layout import SQUARE_BLOCKS, ScaleLayout, layout_of
from quaver.recipes.scale_rules import RULES, rule_of, scales_by_rule
from quaver.runtime.devices import is_cpu
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.tracing import assume_constant_result

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""The types of a tensor that is neither fake nor another subclass."""

EPS = 1e-12
"""The smallest amax that still moves the scale; the field's constant (torchao.float8, TransformerEngine)."""

_INT_VIEW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_ABS_MASK = {torch.int16: 0x7FFF, torch.int32: 0x7FFFFFFF}
_BITS_PAY_FROM = 8192  # elements; below, two more calls cost more than they save
_NAN_BITS = 0x7FC00000
_MANTISSA_CLEARED = -(1 << 23)  # keeps sign and exponent of a float32

# A 0-dim tensor costs half of what a Python number costs, per call, as an operand of an eager operation.
# Plain float32 tensors even if this is imported under a fake mode, a meta device or bfloat16 as the default dtype.
with without_dispatch_modes():
    _MAX = {dtype: torch.tensor(fmt.max, dtype=torch.float32, device="cpu") for dtype, fmt in FORMATS.items()}
    _LARGEST_QUANT_SCALE = {
        dtype: torch.tensor(fmt.max / EPS, dtype=torch.float32, device="cpu") for dtype, fmt in FORMATS.items()
    }


class PersistentScale(NamedTuple):
    """The scale of one operand that persists from step to step (delayed and static scaling), as views of its state."""

    quant_scale: Tensor
    """float32 (). A scale <= 0 or NaN means uninitialized: the operand is then scaled by its own amax."""
    amax_buffer: Tensor | None
    """float32 [2]: the largest amax of any cast since the last sync, and the most elements that saturated in one cast;
    -1 before the first. None where nothing is recorded."""
    is_initialized: Tensor
    """bool () on the CPU: whether quant_scale is above 0, for decisions that the host must take."""
    is_known: bool = False
    """Whether the host has read that quant_scale is above 0; compiled code guards on it."""
    elements: tuple[Tensor, ...] | None = None
    """The two elements of amax_buffer, as tensors () of their own: compiled code updates these in fewer kernels."""


class PersistentScales(NamedTuple):
    """The persistent scales of a linear's operands; None for an operand that is scaled dynamically."""

    input: PersistentScale | None
    weight: PersistentScale | None
    grad_output: PersistentScale | None


NO_PERSISTENT_SCALES = PersistentScales(None, None, None)


def runs_eagerly_on_cpu(tensor: Tensor) -> bool:
    """Whether operations on `tensor` run at once on a CPU: it is not traced, not fake, and not a subclass."""
    return is_cpu(tensor) and type(tensor) in PLAIN_TYPES and not torch.compiler.is_dynamo_compiling()


def check_hp(hp: Tensor) -> None:
    """Raise ValueError unless `hp` is of a high-precision dtype. Fake casts ask, too, so that graphs are refused."""
    if hp.dtype not in HP_DTYPES:
        raise ValueError(f"expected a tensor of {', '.join(map(str, HP_DTYPES))}, got {hp.dtype}")


def amax(hp: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude of `hp`: over everything, or along `dim`.

    Args:
        hp: float32, bfloat16 or float16, any shape and strides.
        dim: None for one value (tensorwise), or the dim to reduce (rowwise).
    Returns:
        Exact, in hp's dtype: shape () for None, else hp's shape with `dim` reduced to 1. NaN where a NaN is among
        the values, 0 where there are none.
    Raises:
        ValueError: hp is not of a high-precision dtype.
    """
    check_hp(hp)
    if hp.numel() == 0:
        shape = () if dim is None else [1 if i == dim % hp.dim() else n for i, n in enumerate(hp.shape)]
        return hp.new_zeros(shape)
    if runs_eagerly_on_cpu(hp) and hp.numel() >= _BITS_PAY_FROM:
        return _amax_of_bits(hp, dim)
    magnitude = hp.abs()
    return magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=True)


def _amax_of_bits(hp: Tensor, dim: int | None) -> Tensor:
    """`amax` through the integers: IEEE magnitudes order like their bits, NaNs on top. Twice as fast on a CPU."""
    ints = _INT_VIEW[hp.dtype]
    magnitude = hp.view(ints).bitwise_and(_ABS_MASK[ints])
    return (magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=True)).view(hp.dtype)


def amax_to_quant_scale(amax: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False) -> Tensor:
    """The factor that brings `amax` to the largest number of `float8_dtype`.

    Args:
        amax: any shape, a high-precision dtype.
        float8_dtype: what will be cast to.
        power_of_2: round the scale down to a power of two, by clearing its mantissa.
    Returns:
        float32, amax's shape.
    """
    if runs_eagerly_on_cpu(amax):
        scale = torch.div(_MAX[float8_dtype], amax.float()).clamp_max_(_LARGEST_QUANT_SCALE[float8_dtype])
    elif power_of_2:
        return _power_of_2_below(amax.float(), float8_dtype)
    else:  # [Note: one division, two formulas]
        # The cap comes after the rounding, because torch 2.11's compiler drops a float64 -> float32 -> float64 that has
        # nothing between (`pointless_convert` in its joint graph passes): to_dequant_scale would divide unrounded.
        largest, largest_quant_scale = _scale_constants(float8_dtype)
        scale = (largest / amax.double()).float().clamp(max=largest_quant_scale)
    return round_down_to_power_of_2(scale) if power_of_2 else scale


def _power_of_2_below(amax: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """The same for powers of two, by integers: a float64 division takes 40 instructions where compiled code fuses it.

    2^k is at most largest / amax where the bits of amax, k exponents up, are at most those of `largest`. RN32 of the
    quotient is the same power of two: with a mantissa of 1.75 the quotient of the next amax is too far below.
    """
    largest_bits, most = _power_of_2_constants(float8_dtype)
    exponent = ((largest_bits - amax.view(torch.int32)) >> 23).clamp(max=most)
    scale = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(amax < torch.inf, scale, torch.where(amax == torch.inf, 0.0, amax))


# [Note: floats under dynamic shapes] With dynamic=True Dynamo makes a float of a module an input of the graph, which it
# cannot hand to the graph of an autograd function inside (torch 2.13). It runs these functions when it traces.


@assume_constant_result
def _scale_constants(float8_dtype: torch.dtype) -> tuple[float, float]:
    """The format's largest number, and the largest quant_scale."""
    largest = format_of(float8_dtype).max
    return largest, largest / EPS


@assume_constant_result
def _power_of_2_constants(float8_dtype: torch.dtype) -> tuple[int, int]:
    """The bits of the format's largest number, and the exponent of the largest power of two that is a quant_scale."""
    largest = format_of(float8_dtype).max
    return bits_of(largest), math.frexp(largest / EPS)[1] - 1


def bits_of(number: float) -> int:
    """The bits of a float32 number."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def round_down_to_power_of_2(scale: Tensor) -> Tensor:
    """A float32 tensor of positive numbers with their mantissas cleared, which is exact; NaN stays NaN."""
    rounded = scale.view(torch.int32).bitwise_and(_MANTISSA_CLEARED).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)  # a NaN without its mantissa would be an inf


def to_dequant_scale(quant_scale: Tensor) -> Tensor:
    """The factor that undoes `quant_scale` (float32, same shape). Exact where the scale is a power of two."""
    if runs_eagerly_on_cpu(quant_scale):
        return quant_scale.reciprocal()
    return (1.0 / quant_scale.double()).float()  # [Note: one division, two formulas]


class Scales(NamedTuple):
    """The scale of one cast in both directions: float32: (), the matrix's with the contracted dim 1, or blocks'."""

    quant: Tensor
    dequant: Tensor
    outer: Tensor | None = None
    """float32 (), which multiplies dequant too; None in formats of one level (e2m1.py has two)."""


def scales_of(amax: Tensor, float8_dtype: torch.dtype, power_of_2: bool, block_mode: str | None = None) -> Scales:
    """The scales that bring `amax` (a high-precision dtype, any shape) to the largest number of `float8_dtype`.

    `block_mode`: None for scales of the tensor, of rows and of columns; for those of blocks the `mode` of
    `dynamic_cast_blocks`. Blocks of zeros have a scale of 1. A rule of scale_rules.py is for all of them; amaxes are
    then in the dtype of what they are of, as some rules ask for it.
    """
    if float8_dtype is E2M1.dtype:
        return Scales(*e2m1.scales_of_blocks(amax))
    if block_mode in RULES:
        return Scales(*scales_by_rule(amax, float8_dtype, block_mode))
    if block_mode:
        return e8m0_scales(amax, float8_dtype, block_mode)
    quant = amax_to_quant_scale(amax, float8_dtype, power_of_2=power_of_2)
    if block_mode is not None:
        quant = quant.masked_fill_(amax == 0, 1.0)
    return Scales(quant, to_dequant_scale(quant))


def scales_of_parts(
    amaxes: Tensor, lengths: Sequence[int], float8_dtype: torch.dtype, power_of_2: bool, block_mode: str | None = None
) -> list[Scales]:
    """`scales_of` of the parts of a vector, each of which has the amaxes of one tensor; at once where that is alike."""
    if float8_dtype is E2M1.dtype:
        return [scales_of(part, float8_dtype, power_of_2, block_mode) for part in amaxes.split(list(lengths))]
    made = scales_of(amaxes, float8_dtype, power_of_2, block_mode)
    return [Scales(*pair) for pair in zip(*(each.split(list(lengths)) for each in made[:2]), strict=True)]


def factor_of(scales: Scales, mode: str) -> tuple[Tensor, str]:
    """What `cast_to_float8` scales by under a rule, and its `divisor_of`."""
    return (scales.dequant, mode) if mode and rule_of(mode).divides else (scales.quant, "")


def cast_to_float8(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, *, is_of_amax: bool = False, divisor_of: str = ""
) -> Tensor:
    """Scale and cast, saturating: what overflows becomes the largest finite number, inf and NaN become NaN.

    Args:
        hp: float32, bfloat16 or float16, any shape.
        quant_scale: float32, broadcastable to hp: shape () or hp's shape with 1s.
        float8_dtype: what to cast to.
        is_of_amax: that quant_scale is of the amax of all that it scales. It is then 0 where there is an inf, whose
            product with it is NaN, so that none has to be looked for. Changes no result.
        divisor_of: the rule of scale_rules.py for which quant_scale is a dequant_scale to divide by; "" to multiply.
    Returns:
        float8, hp's shape, and hp's strides where those are dense.
    """
    if divisor_of:
        return _saturate_(_nan_for_inf_(divide(hp, quant_scale, divisor_of), hp), float8_dtype)
    return _saturate_(multiply(hp, quant_scale, is_of_amax=is_of_amax), float8_dtype)


def divide(hp: Tensor, dequant_scale: Tensor, rule: str) -> Tensor:
    """The quotients of a rule that divides, float32."""
    is_rounded_once = runs_eagerly_on_cpu(hp)  # [Note: one division, two formulas]
    quotient = hp.float() / dequant_scale if is_rounded_once else (hp.double() / dequant_scale.double()).float()
    if not rule_of(rule).in_hp_dtype:
        return quotient
    quotient = quotient.to(hp.dtype).float()
    return torch.where(quotient == 0, 0.0, quotient)


def multiply(hp: Tensor, quant_scale: Tensor, *, is_of_amax: bool = False) -> Tensor:
    """The float32 product that `cast_to_float8` saturates; see there for the arguments. NaN for an infinite hp."""
    scaled = hp * quant_scale if hp.dtype is torch.float32 else hp.float().mul_(quant_scale)
    return scaled if is_of_amax else _nan_for_inf_(scaled, hp)


def _nan_for_inf_(scaled: Tensor, hp: Tensor) -> Tensor:
    """`scaled`, and NaN where `hp` is infinite."""
    if torch.compiler.is_dynamo_compiling():  # a compiler merges no equal operations that have a NaN as an argument
        return scaled - (hp - hp).abs()
    return scaled.masked_fill_(hp.isinf(), torch.nan)


def _saturate_(scaled: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """torch's own cast from an overflowing value changed between releases (NaN, inf or the maximum): clamp first."""
    largest, _ = _scale_constants(float8_dtype)
    return scaled.clamp_(-largest, largest).to(float8_dtype)


def cast_with_persistent_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast `hp` with a scale from an earlier step (delayed or static), and measure how well that scale fits.

    Args:
        hp: float32, bfloat16 or float16, any shape.
        quant_scale: float32 (). A scale <= 0 or NaN means uninitialized: `hp` is then scaled by its own amax.
        float8_dtype: what to cast to.
        power_of_2: round a scale computed from hp down to a power of two. A given scale is used as it is.
    Returns:
        float8 of hp's shape; the float32 quant_scale () that was used, and its dequant_scale; and float32 [2]: the
        amax of hp, and the number of saturated elements, those whose clamping error exceeds the largest rounding error
        (counted exactly up to 2^24).

    Finite values that overflow become the largest finite number. Infinities and NaNs in `hp` become NaN codes, so that
    they reach the results as in high precision; with dynamic scaling the scale itself carries them.
    """
    fmt = FORMATS[float8_dtype]
    largest_seen = amax(hp).float()
    own = amax_to_quant_scale(largest_seen, float8_dtype, power_of_2=power_of_2)
    quant = torch.where(quant_scale > 0, quant_scale, own)
    scaled = multiply(hp, quant)
    saturated = (scaled.abs() > fmt.saturates_above).sum(dtype=torch.float32)
    return _saturate_(scaled, float8_dtype), quant, to_dequant_scale(quant), torch.stack([largest_seen, saturated])


def dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None = None, *, power_of_2: bool = False, mode: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `hp` with the scale of its own amax; see `amax` and `amax_to_quant_scale` for the arguments.

    `mode`: a rule of scale_rules.py; "" for quaver's.

    Returns:
        The float8 tensor, and float32 quant_scale and dequant_scale (shape () or hp's shape with `dim` reduced to 1).
    """
    scales = scales_of(amax(hp, dim), float8_dtype, power_of_2, mode or None)
    factor, divisor_of = factor_of(scales, mode)
    codes = cast_to_float8(hp, factor, float8_dtype, is_of_amax=True, divisor_of=divisor_of)
    return codes, scales.quant, scales.dequant


# ---- blocks ----------------------------------------------------------------------------------------------------------


def block_amax(hp: Tensor, layout: ScaleLayout = SQUARE_BLOCKS) -> Tensor:
    """The largest magnitude in each block of `hp` [R, C], in its dtype, of the shape of its scales.

    Raises:
        ValueError: hp is no matrix of a high-precision dtype.
    """
    if hp.dtype not in HP_DTYPES or hp.dim() != 2:
        expected = f"expected a matrix of {', '.join(map(str, HP_DTYPES))}"
        raise ValueError(f"{expected}, got {hp.dtype} of {list(hp.shape)}")
    rows, columns = layout.rows, layout.columns
    magnitude = hp.abs()
    missing = -hp.shape[0] % rows, -hp.shape[1] % columns
    if any(missing):
        magnitude = torch.nn.functional.pad(magnitude, (0, missing[1], 0, missing[0]))
    counts = layout.scale_shape(hp.shape[0], hp.shape[1])
    return magnitude.view(counts[0], rows, counts[1], columns).amax((1, 3)) if hp.numel() else hp.new_zeros(counts)


def dynamic_cast_blocks(
    hp: Tensor,
    float8_dtype: torch.dtype,
    *,
    power_of_2: bool = False,
    block_size: Sequence[int] = SQUARE_BLOCKS,
    mode: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix with the scale of each block's own amax.

    Args:
        hp: [R, C], float32, bfloat16 or float16, any strides.
        float8_dtype: what to cast to.
        power_of_2: round the scales down to powers of two.
        block_size: rows and columns of a block.
        mode: "rceil" or "floor" for E8M0 scales; a rule of scale_rules.py; "" for the rule of all other casts.
    Returns:
        float8 [R, C], contiguous; float32 quant_scale and dequant_scale [ceil(R / rows), ceil(C / columns)].
    """
    layout = ScaleLayout(*block_size)
    scales = scales_of(block_amax(hp, layout), float8_dtype, power_of_2, mode)
    factor, divisor_of = factor_of(scales, mode)
    return cast_blocks(hp, factor, float8_dtype, layout, True, divisor_of), scales.quant, scales.dequant


def cast_blocks(
    hp: Tensor,
    quant_scale: Tensor,
    float8_dtype: torch.dtype,
    layout: ScaleLayout,
    is_of_amax: bool = False,
    divisor_of: str = "",
) -> Tensor:
    """`cast_to_float8` of a matrix [R, C], contiguous. `quant_scale` has one element a block."""
    if divisor_of:
        of_elements = _multiply_blocks_(torch.ones_like(hp, dtype=torch.float32), quant_scale, layout)
        return cast_to_float8(hp, of_elements, float8_dtype, divisor_of=divisor_of).contiguous()
    scaled = hp.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _multiply_blocks_(scaled, quant_scale, layout)
    if float8_dtype is E2M1.dtype:
        return e2m1.encode(scaled)
    return _saturate_(scaled if is_of_amax else _nan_for_inf_(scaled, hp), float8_dtype)


@assume_constant_result
def saturates_above(float8_dtype: torch.dtype) -> float:
    """See `Float8Format`."""
    return format_of(float8_dtype).saturates_above


@assume_constant_result
def e8m0_offset(float8_dtype: torch.dtype, mode: str) -> int:
    """The integer that, added to the bits of a float32 amax before its mantissa is cleared, gives the dequant_scale's.

    RCEIL carries where the amax has the larger mantissa, so that amax / max is no power of two.
    """
    largest = bits_of(FORMATS[float8_dtype].max)
    carry = ~_MANTISSA_CLEARED - (largest & ~_MANTISSA_CLEARED) if mode == "rceil" else 0
    return int(carry - (((largest >> 23) - 127) << 23))


def e8m0_scales(amax: Tensor, float8_dtype: torch.dtype, mode: str) -> Scales:
    """The E8M0 scales of blocks by "rceil" or "floor", as float32; see the top of the file.

    `amax`: a high-precision dtype, any shape. Both scales are powers of two, or NaN.
    """
    amax = amax.float()
    bits = amax.view(torch.int32) + e8m0_offset(float8_dtype, mode)
    dequant = bits.bitwise_and_(_MANTISSA_CLEARED).clamp_(min=0)
    quant = (254 << 23) - dequant
    dequant.clamp_(min=1 << 22)  # 2^-127 is subnormal
    # As an integer: no NaN of a graph equals another, and the compiler would not merge the casts of q, k and v.
    is_finite = amax < torch.inf
    return Scales(*(torch.where(is_finite, bits, _NAN_BITS).view(torch.float32) for bits in (quant, dequant)))


def multiply_scale_(wide: Tensor, scale: Tensor, layout: ScaleLayout | None = None) -> Tensor:
    """Multiply a matrix [R, C] in place by its scale.

    `layout`: None to find it by the shape of the scale (`layout_of`, which raises ValueError for one that has none).
    """
    layout = layout or layout_of(scale, wide.shape)
    return wide.mul_(scale) if scale.dim() == 0 else _multiply_blocks_(wide, scale, layout)


def _multiply_blocks_(wide: Tensor, scale: Tensor, layout: ScaleLayout) -> Tensor:
    """Multiply a matrix in place by one number a block."""
    if all(count in (1, elements) for count, elements in zip(scale.shape, wide.shape, strict=True)):
        return wide.mul_(scale)
    block_size = layout.block(wide.shape)
    for in_rows, of_rows, rows in _block_parts(wide.shape[0], block_size[0]):
        for in_columns, of_columns, columns in _block_parts(wide.shape[1], block_size[1]):
            blocks = wide[in_rows, in_columns].unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            blocks.mul_(scale[of_rows, None, of_columns, None])
    return wide


def _block_parts(elements: int, length: int) -> Iterator[tuple[slice, slice, int]]:
    """The whole blocks of a dim and the one that is cut: which elements, which scales, and how long a block is."""
    whole = elements // length
    if whole:
        yield slice(0, whole * length), slice(0, whole), length
    if elements % length:
        yield slice(whole * length, elements), slice(whole, whole + 1), elements % length


def dequantize(
    codes: Tensor,
    dequant_scale: Tensor,
    hp_dtype: torch.dtype = torch.float32,
    layout: ScaleLayout | None = None,
    outer_scale: Tensor | None = None,
) -> Tensor:
    """RN(RN32(codes * dequant_scale)): the values of a float8 matrix [R, C] in a high-precision dtype.

    `dequant_scale`: float32, of `layout`; see `multiply_scale_`.
    """
    codes = e2m1.unpack(codes) if codes.dtype is E2M1.dtype else codes
    wide = codes.to(torch.float32, memory_format=torch.contiguous_format)
    values = multiply_scale_(wide, dequant_scale.float(), layout)
    return (values if outer_scale is None else values.mul_(outer_scale)).to(hp_dtype)


def sqnr_db(exact: Tensor, rounded: Tensor) -> float:
    """The signal to quantization noise ratio, 20 log10(norm(exact) / norm(exact - rounded)) in dB; inf if equal."""
    exact = exact.detach().double()
    return decibels(exact.norm().item(), (exact - rounded.detach().double()).norm().item())


def decibels(signal: float, noise: float) -> float:
    """20 log10(signal / noise) of two norms: inf without noise, -inf without signal or where noise is not finite."""
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def without_inf(decibels: Mapping[str, float]) -> dict[str, float | None]:
    """Decibels as JSON holds them, which has no inf: the SQNR of what the codes hold exactly."""
    return {name: value if math.isfinite(value) else None for name, value in decibels.items()}
