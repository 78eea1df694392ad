"""Code shared by the Triton kernels: supported tensors, the arithmetic of a cast, and tiles of a matrix [R, C].

The device functions are bit-identical to quaver/recipes/scaling.py, including NaN, inf, zero and subnormal numbers.
Nothing is flushed to zero.

Grid: one program per tile; tiles are numbered along the rows. Mask: elements outside the matrix are read as 0 and not
written. A thread loads 16 bytes at a time, and stores 8 row codes or 16 column codes at a time. If R or C is not a
multiple of 16, accesses are narrower and tiles smaller. Addresses are 64-bit.

[Note: transposing a tile] Codes go through shared memory to be stored along columns. A thread with single codes of a
column would write shared memory byte by byte. So the rows of a tile are permuted such that a thread loads
`rows_of_thread` adjacent rows: it then holds at least 8 codes of each column, and writes them at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.formats import HP_DTYPES, get_float32_bits, get_format, round_to_float32
from quaver.recipes.scale_rules import SCALE_RULES, get_rule, has_cast_kernel
from quaver.recipes.scaling import EPS, PLAIN_TYPES
from quaver.runtime.devices import get_compute_capability

UNAVAILABLE_REASON: str | None = None
"""Why Triton cannot be imported; None if it can."""
try:
    import triton
    import triton.language as tl
except ImportError as error:  # PyTorch for CPUs lacks it
    triton, UNAVAILABLE_REASON = None, str(error)

INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter on CPU tensors: TRITON_INTERPRET was 1 when triton was imported."""

_INTERPRETED = None if triton is None else tl.constexpr(INTERPRETED)
"""The same for device functions, which may read only globals of type `tl.constexpr`."""

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The float8 formats that NVIDIA GPUs convert to in hardware."""

TRITON_FLOAT8 = {} if triton is None else dict(zip(FLOAT8_DTYPES, (tl.float8e4nv, tl.float8e5), strict=True))

MIN_CAPABILITY = (9, 0)
"""The first compute capability on which Triton converts float32 to float8 in one rounding. On 8.9, releases up to at
least 3.6 convert through float16 (triton-lang/triton#11753). Below 8.9 Triton has no e4m3."""


MAX_MATRICES = 65535
"""The largest second dim of a grid (CUDA C programming guide, technical specifications per compute capability)."""


def jit(kernel: Callable[..., Any]) -> Any:
    """Apply `triton.jit`, or return the function itself if triton is missing."""
    if triton is None:
        return kernel
    # A persistent scale is a view into a larger tensor, so its alignment varies. Do not recompile for it.
    return triton.jit(kernel, do_not_specialize_on_alignment=["quant_scale_ptr"])


def supports(hp: Tensor, float8_dtype: torch.dtype, rule: str = "") -> bool:
    """Return whether the kernels cast `hp` [R, C] by this rule: plain, contiguous, not empty, on a GPU from sm_90 on.

    Under TRITON_INTERPRET the tensor is on the CPU. Do not call it while compiling.
    """
    return float8_dtype in FLOAT8_DTYPES and supports_matrix(hp) and has_cast_kernel(rule)


def supports_matrix(hp: Tensor) -> bool:
    """Return `supports` for a kernel that writes no codes."""
    return hp.dtype in HP_DTYPES and hp.dim() == 2 and supports_tensor(hp)


def supports_tensor(tensor: Tensor) -> bool:
    """Return whether the device, strides and class of `tensor` pass the checks of `supports`."""
    return (
        triton is not None
        and type(tensor) in PLAIN_TYPES
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and (INTERPRETED if tensor.is_cpu else tensor.is_cuda and explain_kernel_obstacle(tensor.device.index) is None)
    )


def explain_kernel_obstacle(device_index: int | None) -> str | None:
    """Return why the kernels do not run on this GPU, or None if they do."""
    if UNAVAILABLE_REASON is not None:
        return f"Triton cannot be imported: {UNAVAILABLE_REASON}"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if (capability := get_compute_capability(device_index)) < MIN_CAPABILITY:
        return "Triton converts to float8 in one rounding from sm_90 on, and this is sm_{}{}".format(*capability)
    return None


class KernelTile(NamedTuple):
    """The part of a matrix that one program processes."""

    rows: int
    columns: int
    warps: int
    rows_of_thread: int = 1
    """rows * columns / (threads * elements of a load): see [Note: transposing a tile]."""
    column_codes_of_store: int = 16
    """8 for a square tile: with 16, Triton would give loads of hp the layout of these stores, which have its shape."""


def launch(kernel: Any, hp: Tensor, tile: KernelTile, *args: Tensor | int | None, **constants: Any) -> None:
    """Launch `kernel` with one program per tile of each matrix of `hp` [..., R, C], on a grid [tiles, matrices].

    The kernel's arguments are hp, `args`, R, C, TILE and `constants`.
    """
    *matrices, height, width = hp.shape
    tiles = triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.columns)
    with torch.cuda.device_of(hp):
        kernel[tiles, math.prod(matrices)](hp, *args, height, width, TILE=tile, num_warps=tile.warps, **constants)


def choose_tile(hp: Tensor, *, column_codes: bool = False) -> KernelTile:
    """Choose the tile for `hp` [R, C]: eight loads of 16 bytes per thread, or a smaller tile for narrow accesses."""
    height, width = hp.shape
    if width % 16 or hp.data_ptr() % 16 or (column_codes and height % 16):
        return KernelTile(64, 32, warps=4, rows_of_thread=16)
    return KernelTile(128, 64, warps=2 * hp.element_size(), rows_of_thread=8)


CodePair = tuple[Tensor | None, Tensor | None]
"""Row codes and column codes; None for codes that were not requested."""


def empty_codes(hp: Tensor, float8_dtype: torch.dtype, row: bool, column: bool) -> CodePair:
    """Allocate the requested codes of `hp` [R, C]."""
    height, width = hp.shape
    row_codes = hp.new_empty(height, width, dtype=float8_dtype) if row else None
    column_codes = hp.new_empty(width, height, dtype=float8_dtype).t() if column else None
    return row_codes, column_codes


class CastTarget(NamedTuple):
    """The constants of a cast for a kernel: its target format and its rule of scales."""

    float8: Any
    conversion: str
    max: float
    largest_quant_scale: float
    saturates_above: float
    power_of_2: bool
    max_bits: int
    largest_exponent: int
    """The largest exponent of a quant_scale that is a power of two."""
    by_rule: bool
    """Whether a rule of scale_rules.py computes the scales; the following fields describe it."""
    inverse_max: float
    equations: str
    smallest_amax: float
    smallest_scale: float
    has_zero: bool
    quant_of_zero: float
    dequant_of_zero: float
    rounds_up: bool
    divides: bool


@functools.cache
def make_cast_target(float8_dtype: torch.dtype, power_of_2: bool = False, rule: str = "") -> CastTarget:
    """Make the constants of a cast to `float8_dtype` whose scales are computed by `rule`."""
    fmt = get_format(float8_dtype)
    pair = f"cvt.rn.satfinite.{'e4m3' if fmt.dtype is torch.float8_e4m3fn else 'e5m2'}x2.f32"
    statements = ".reg .b16 low, high;", f"{pair} low, $2, $1;", f"{pair} high, $4, $3;", "mov.b32 $0, {low, high};"
    conversion = "\n".join(("{", *statements, "}"))
    limits = fmt.max, fmt.max / EPS, fmt.saturates_above
    exponents = get_float32_bits(fmt.max), math.frexp(fmt.max / EPS)[1] - 1
    scale_rule = get_rule(rule)
    quant_of_zero, dequant_of_zero = scale_rule.zero_scales or (0.0, 0.0)
    return CastTarget(
        TRITON_FLOAT8[float8_dtype],
        conversion,
        *limits,
        power_of_2,
        *exponents,
        by_rule=rule in SCALE_RULES,
        inverse_max=round_to_float32(1 / fmt.max),
        equations=scale_rule.equations,
        smallest_amax=scale_rule.smallest_amax,
        smallest_scale=scale_rule.smallest_scale,
        has_zero=scale_rule.zero_scales is not None,
        quant_of_zero=quant_of_zero,
        dequant_of_zero=dequant_of_zero,
        rounds_up=scale_rule.rounds_up,
        divides=scale_rule.divides,
    )


@jit
def widen(hp: tl.tensor) -> tl.tensor:
    """Convert hp to float32, exactly."""
    if _INTERPRETED and hp.dtype == tl.bfloat16:
        return _widen_bfloat16(hp)
    return hp.to(tl.float32)


@jit
def get_magnitude_bits(hp: tl.tensor) -> tl.tensor:
    """Return the bits of |hp| (float32) as int32, which order like |hp| with NaNs on top."""
    return hp.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def compute_amax_bits(hp: tl.tensor, axis: tl.constexpr = None) -> tl.tensor:
    """Compute the maximum of `get_magnitude_bits(widen(hp))`, of all elements or along an axis, before widening.

    A GPU compares two 16-bit integers at once, but `tl.max` would widen them.
    """
    if hp.dtype.primitive_bitwidth == 32:
        bits = tl.max(get_magnitude_bits(hp), axis)
    else:
        largest = tl.reduce(hp.to(tl.int16, bitcast=True) & 0x7FFF, axis, tl.standard._elementwise_max)
        bits = get_magnitude_bits(widen(largest.to(hp.dtype, bitcast=True)))
    return bits


@jit
def hide_from_cse(hp: tl.tensor) -> tl.tensor:
    """Return hp, hidden from common subexpression elimination.

    A 16-bit tile takes half the registers of the float32 numbers computed from it. So a kernel that needs these numbers
    before and after a barrier or a branch computes them twice.
    """
    if _INTERPRETED:
        return hp
    PACK: tl.constexpr = 32 // hp.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [hp], dtype=hp.dtype, is_pure=False, pack=PACK)


@jit
def view_bits(amax_ptr: tl.tensor) -> tl.tensor:
    """Return a pointer to the same float32 numbers as int32, which order like non-negative float32 numbers."""
    return amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@jit
def amax_to_quant_scale(amax: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Compute `quaver.recipes.scaling.amax_to_quant_scale` of float32 numbers."""
    if CAST.power_of_2:  # see `_compute_power_of_2_scale` in scaling.py
        bits = amax.to(tl.int32, bitcast=True)
        exponent = tl.minimum((CAST.max_bits - bits) >> 23, CAST.largest_exponent)
        quant = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(bits < 0x7F800000, quant, tl.where(bits == 0x7F800000, 0.0, amax))
    quant = tl.div_rn(CAST.max, amax)
    return tl.where(quant > CAST.largest_quant_scale, CAST.largest_quant_scale, quant)


@jit
def to_dequant_scale(quant: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Compute `quaver.recipes.scaling.to_dequant_scale` of the result of `amax_to_quant_scale`.

    An integer subtraction inverts a power of two. 0, which stands for an amax of inf, and NaN are handled separately.
    """
    if CAST.power_of_2:
        inverse = ((254 << 23) - quant.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return tl.where(quant > 0, inverse, tl.where(quant == 0, float("inf"), quant))
    return tl.div_rn(1.0, quant)


@jit
def compute_scales(amax: tl.tensor, CAST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Run `quaver.recipes.scaling.compute_scales` on float32 numbers; without a rule, return the quant_scales twice."""
    if not CAST.by_rule:
        quant = amax_to_quant_scale(amax, CAST)
        return quant, quant
    clamped = tl.where(amax < CAST.smallest_amax, CAST.smallest_amax, amax)
    if CAST.equations == "reciprocal":
        quant = tl.div_rn(1.0, clamped) * CAST.max
        dequant = tl.div_rn(1.0, quant)
    elif CAST.equations == "amax":
        quant = tl.div_rn(CAST.max, clamped)
        dequant = clamped * CAST.inverse_max
    else:
        dequant = tl.div_rn(clamped, CAST.max)
        dequant = tl.where(dequant < CAST.smallest_scale, CAST.smallest_scale, dequant)
        quant = tl.div_rn(1.0, dequant)
    if CAST.rounds_up:
        dequant = tl.where(dequant < CAST.smallest_scale, CAST.smallest_scale, dequant)
        rounded = (dequant.to(tl.int32, bitcast=True) + 0x7FFFFF) & -(1 << 23)
        dequant = tl.where(dequant < float("inf"), rounded.to(tl.float32, bitcast=True), dequant)
        quant = tl.div_rn(1.0, dequant)
    if CAST.has_zero:
        quant = tl.where(amax == 0, CAST.quant_of_zero, quant)
        dequant = tl.where(amax == 0, CAST.dequant_of_zero, dequant)
    return quant, dequant


@jit
def apply_scale(hp: tl.tensor, quant: tl.tensor, dequant: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Apply the result of `compute_scales`, by multiplication or by division."""
    if CAST.divides:
        return tl.div_rn(hp, tl.broadcast_to(dequant, hp.shape))
    return hp * quant


@jit
def replace_inf_by_nan(hp: tl.tensor) -> tl.tensor:
    """Replace inf by NaN in hp (float32), for scales that were not computed from hp's amax.

    hp * 0 is NaN for inf, otherwise a zero of hp's sign, which changes no bit.
    """
    return tl.fma(hp, 0.0, hp)


@jit
def store_scales(
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    quant: tl.tensor,
    dequant: tl.tensor,
    mask: tl.tensor,
    CAST: tl.constexpr,
) -> None:
    """Store the result of `compute_scales`; without a rule, compute the dequant_scales first."""
    tl.store(quant_ptr, quant, mask=mask)
    tl.store(dequant_ptr, dequant if CAST.by_rule else tl.div_rn(1.0, quant), mask=mask)


@jit
def to_float8(scaled: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Compute RNE8(clamp(scaled, -max, max)). The hardware converts two numbers at once, saturates, and keeps NaN.

    [Note: ptxas before 13] With Triton's own conversion, ptxas 12.8 and 12.9 miscompile a pair of codes that is stored
    twice, as row codes and as column codes. The second code is read from an undefined register
    (triton-lang/triton#11111). Here the assembly returns four codes in one register, so no pair is used twice.
    """
    if _INTERPRETED:
        return _round_to_float8(scaled, CAST)
    codes = tl.inline_asm_elementwise(CAST.conversion, "=r,f,f,f,f", [scaled], dtype=tl.uint8, is_pure=True, pack=4)
    return codes.to(CAST.float8, bitcast=True)


@jit
def make_column_range(hp_ptr: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return 0 to SIZE - 1, with a hint of 16 bytes of hp per thread, so that a warp loads 512 consecutive bytes.

    Without the hint the compiler gives each thread 16 codes, for the widest stores, and a warp's loads have gaps.
    """
    return tl.max_contiguous(tl.arange(0, SIZE), 128 // hp_ptr.dtype.element_ty.primitive_bitwidth)


@jit
def load_tile_in_float32(
    hp_ptr: tl.tensor, tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Run `load_tile`, and convert to float32."""
    hp, r, c = load_tile(hp_ptr, tile, rows, columns, TILE)
    return widen(hp), r, c


@jit
def load_tile(
    hp_ptr: tl.tensor, tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load a tile of hp [rows, columns] in its dtype; also return the indices of its rows and columns."""
    tiles_across = tl.cdiv(columns, TILE.columns)
    order = tl.arange(0, TILE.rows)
    STRIPES: tl.constexpr = TILE.rows // TILE.rows_of_thread
    r = (tile // tiles_across).to(tl.int64) * TILE.rows + (order % STRIPES) * TILE.rows_of_thread + order // STRIPES
    c = (tile % tiles_across).to(tl.int64) * TILE.columns + make_column_range(hp_ptr, TILE.columns)
    return tl.load(hp_ptr + r[:, None] * columns + c[None, :], mask=make_mask(r, rows, c, columns), other=0.0), r, c


@jit
def make_mask(i: tl.tensor, i_end: tl.tensor, j: tl.tensor, j_end: tl.tensor) -> tl.tensor:
    """Return the mask of a block: i < i_end and j < j_end."""
    return (i < i_end)[:, None] & (j < j_end)[None, :]


@jit
def store_row_codes(
    codes_ptr: tl.tensor, codes: tl.tensor, r: tl.tensor, c: tl.tensor, rows: tl.tensor, columns: tl.tensor
) -> None:
    """Store the codes of a tile to row codes [rows, columns]."""
    tl.store(codes_ptr + r[:, None] * columns + c[None, :], codes, mask=make_mask(r, rows, c, columns))


@jit
def store_column_codes(
    codes_ptr: tl.tensor,
    codes: tl.tensor,
    tile: tl.tensor,
    c: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Store the codes of a tile to column codes [columns, rows], with the rows of the tile back in order."""
    STRIPES: tl.constexpr = TILE.rows // TILE.rows_of_thread
    stripes = tl.permute(tl.reshape(codes, [TILE.rows_of_thread, STRIPES, TILE.columns]), [2, 1, 0])
    transposed = tl.reshape(stripes, [TILE.columns, TILE.rows])
    CODES_OF_STORE: tl.constexpr = TILE.column_codes_of_store
    order = tl.max_contiguous(tl.arange(0, TILE.rows), [CODES_OF_STORE])  # Triton 3.6 takes a list of constexprs
    r = (tile // tl.cdiv(columns, TILE.columns)).to(tl.int64) * TILE.rows + order
    tl.store(codes_ptr + c[:, None] * rows + r[None, :], transposed, mask=make_mask(c, columns, r, rows))


# Two conversions of Triton's interpreter are wrong (`_convert_float`, Triton 3.6 to 3.9); the functions below replace
# them. Its bfloat16 -> float32 drops the leading bit of subnormals. Its float32 -> float8 rounds halves up, loses the
# carry out of the mantissa if the exponent is odd (1.97 -> 1), and truncates subnormal results. Remove the functions
# when triton-lang/triton#8322 is fixed (by #11897).


@jit
def _widen_bfloat16(hp: tl.tensor) -> tl.tensor:
    return (hp.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _round_to_float8(scaled: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Round by adding a power of two: its last place is the spacing of float8 numbers at this exponent."""
    clamped = tl.clamp(scaled, -CAST.max, CAST.max, propagate_nan=tl.PropagateNan.ALL)
    MANTISSA_BITS: tl.constexpr = CAST.float8.fp_mantissa_width
    SMALLEST_NORMAL: tl.constexpr = 128 - CAST.float8.exponent_bias  # float8's lowest exponent, as float32 stores it
    bits = clamped.to(tl.int32, bitcast=True)
    exponent = tl.maximum(get_magnitude_bits(clamped) >> 23, SMALLEST_NORMAL)
    power = (exponent + (23 - MANTISSA_BITS)) << 23
    steps = (tl.abs(clamped) + power.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - power
    code = ((exponent - SMALLEST_NORMAL) << MANTISSA_BITS) + steps
    code = tl.where(clamped == clamped, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(CAST.float8, bitcast=True)
