"""The cast of a matrix with one scale for all of it, on an NVIDIA GPU, in Triton: the oracle's bits (scaling.py).

    quant     = quant_scale where that is known, else RN32(max / amax), capped, optionally rounded down to 2^k
    scaled    = RN32(float32(hp) * quant)              with a kept scale NaN where hp is infinite
    codes     = RNE8(clamp(scaled, -max, max))
    dequant   = RN32(1 / quant)
    observed  = [amax, how many |scaled| are above saturates_above]        amax = max |hp|

A kept scale is known where it is above 0. Only the device knows whether it is, and so whether hp must be read once or
twice. Two kernels are launched in any case, and the first leaves at once where there is nothing for it to do:

    _amax_if_unknown   observed[0] = amax     scale known: reads 4 bytes;   unknown: reads hp once
    _cast              the rest               either way: reads hp once, writes the codes once

A dynamic scale is one that is never known: the first kernel then does not ask, and the second records nothing.

Grid and tile: hp is flat. A tile is TILE_BYTES of it, 64 bytes for each thread: four loads of 16 bytes under way at a
time. `_cast` has one program for each tile, the last tile first: it is what the first kernel has left in the cache.
`_amax_if_unknown` has at most AMAX_PROGRAMS, which stride over the tiles, because a full grid that leaves at once takes
microseconds to do so.
Mask: what lies behind the end of hp is read as 0, and not written. Where numel is a multiple of 16 and hp starts on 16
bytes, the mask holds for whole loads; elsewhere loads and stores are narrow.
Positions are 64-bit.

Zero, subnormal, inf, NaN: nothing is flushed to zero. The amax is a maximum of bits, which order like magnitudes with
NaNs on top, so a NaN comes out as a NaN. An infinite or NaN element becomes NaN and is not counted as saturated. An
empty hp has the amax 0. A negative or NaN quant_scale is not known.

The host reads nothing back and waits for nothing: once a first call has compiled the kernels, a CUDA graph can capture
the call. Results do not depend on the order of programs: they are maxima, and sums of integers (exact up to 2^24).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.formats import format_of
from quaver.kernels.triton_blocks import (
    INTERPRETED,
    as_bits,
    dealt_offsets,
    jit,
    load_tile,
    magnitude_bits,
    observe,
    quant_scale_of_matrix,
    scaled_by,
    store_scale_once,
    takes,
    to_float8,
)
from quaver.kernels.zero_pairs import zero_pair
from quaver.scaling import EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

__all__ = ["cast_with_persistent_scale", "takes"]

TILE_BYTES = 8192
WARPS = 4
AMAX_PROGRAMS = 1024


def cast_with_persistent_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quaver.scaling.cast_with_persistent_scale` of an `hp` that `takes` accepts, with its `quant_scale` there."""
    observed = amax_unless_known(hp, quant_scale)
    return (*_flat_cast(hp, quant_scale, observed, float8_dtype, power_of_2), observed)


def dynamic_cast(hp: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`quaver.scaling.dynamic_cast` of the whole of an `hp` that `takes` accepts."""
    return _flat_cast(hp, None, amax_unless_known(hp, None), float8_dtype, power_of_2)


def amax_unless_known(hp: Tensor, quant_scale: Tensor | None) -> Tensor:
    """float32 [2]: the amax of hp (0 where the quant_scale is above 0), and 0."""
    observed = zero_pair(hp)
    tile = TILE_BYTES // hp.element_size()
    tiles = triton.cdiv(hp.numel(), tile)
    if tiles:
        with torch.cuda.device_of(hp):
            _amax_if_unknown[(min(tiles, AMAX_PROGRAMS),)](
                hp, quant_scale, observed, hp.numel(), TILE=tile, INTERPRETED=INTERPRETED, num_warps=WARPS
            )
    return observed


def _flat_cast(
    hp: Tensor, quant_scale: Tensor | None, observed: Tensor, float8_dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    fmt = format_of(float8_dtype)
    codes = torch.empty_like(hp, dtype=float8_dtype)
    quant, dequant = hp.new_empty((), dtype=torch.float32), hp.new_empty((), dtype=torch.float32)
    tile = TILE_BYTES // hp.element_size()
    with torch.cuda.device_of(hp):
        _cast[(max(triton.cdiv(hp.numel(), tile), 1),)](  # without elements there still are scales to write
            hp,
            quant_scale,
            codes,
            quant,
            dequant,
            observed,
            hp.numel(),
            MAX=fmt.max,
            SATURATES_ABOVE=fmt.saturates_above,
            LARGEST_QUANT_SCALE=fmt.max / EPS,
            POWER_OF_2=power_of_2,
            SCALE="amax" if quant_scale is None else "kept",
            TILE=tile,
            INTERPRETED=INTERPRETED,
            num_warps=WARPS,
        )
    return codes, quant, dequant


@jit
def _amax_if_unknown(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """observed[0] = max |hp|, unless there is a quant_scale that is known. observed[0] was 0."""
    kept = 0.0 if quant_scale_ptr is None else tl.load(quant_scale_ptr)
    if not (kept > 0):
        bits = tl.zeros([TILE], tl.int32)
        tile = tl.program_id(0)
        # No range: under NumPy 2.4 the interpreter of Triton 3.6 takes no computed bounds (triton-lang/triton#9171).
        while tile.to(tl.int64) * TILE < numel:
            bits = tl.maximum(bits, magnitude_bits(load_tile(hp_ptr, tile, numel, TILE, INTERPRETED)))
            tile += tl.num_programs(0)
        tl.atomic_max(as_bits(observed_ptr), tl.max(bits), sem="relaxed")


@jit
def _cast(
    hp_ptr: tl.tensor,
    quant_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    quant_ptr: tl.tensor,
    dequant_ptr: tl.tensor,
    observed_ptr: tl.tensor,
    numel: tl.tensor,
    MAX: tl.constexpr,
    SATURATES_ABOVE: tl.constexpr,
    LARGEST_QUANT_SCALE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """All but the amax for a scale that is not known, which is in observed[0] by now."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    hp = load_tile(hp_ptr, tile, numel, TILE, INTERPRETED)
    recorded = tl.load(as_bits(observed_ptr))
    quant = quant_scale_of_matrix(quant_scale_ptr, recorded, MAX, LARGEST_QUANT_SCALE, POWER_OF_2, SCALE)
    store_scale_once(quant_ptr, dequant_ptr, quant, tile)

    scaled = scaled_by(hp, quant, SCALE)
    start = tile.to(tl.int64) * TILE
    offsets = dealt_offsets(hp_ptr, TILE)
    codes = to_float8(scaled, codes_ptr.dtype.element_ty, INTERPRETED)
    tl.store(codes_ptr + start + offsets, codes, mask=start + offsets < numel)
    if SCALE == "kept":
        observe(observed_ptr, recorded, hp, scaled, quant, SATURATES_ABOVE)
