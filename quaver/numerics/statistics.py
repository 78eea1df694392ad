"""Statistics of a matrix and its cast, as float64 sums and extremes that merge in any order.

A tally is a float64 vector of `TALLY_WIDTH` numbers. Each observation yields a tally. The tallies of microbatches,
groups and ranks merge into one, which `summarize_tallies` turns into the statistics of a sample. It holds:

    sums       counts, sums of squares and sums of fourth powers; their ratios do not change if replicas count an
               element twice
    maxima     the largest finite magnitude, the largest scale
    minima     the smallest nonzero magnitude, the smallest scale
    worst      the noise-to-signal ratio and the index of the scale with the lowest SQNR
    exponents  how many scales have each exponent, from which the median follows: exactly for powers of two, rounded
               down to a power of two for other scales

On a CPU the C extension reads a matrix once (kernels/cpu.py). `observe_in_pytorch` is its oracle and runs on any
device. Statistics describe the operand that the linear multiplies: its codes, its scales and its high-precision matrix.

    signal      sum of hp^2 over finite hp
    noise       sum of (hp - code * dequant_scale)^2 over finite hp; infinite if a code or scale is not finite
    underflow   nonzero finite hp whose code is 0
    saturated   infinite hp, and hp * quant_scale above `saturates_above`, which leaves room for an amax whose scale was
                rounded
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quaver.kernels import cpu
from quaver.kernels.operands import Operand, require
from quaver.numerics.record import Float64Array
from quaver.recipes.formats import get_format
from quaver.recipes.scale_layout import TENSORWISE
from quaver.runtime.devices import is_cpu


class TallyIndex(enum.IntEnum):
    """The index of each sum and extreme in a tally."""

    NUMEL = 0
    SIGNAL = 1
    WITH_CODES = 2
    """The elements of `NUMEL` that have codes."""
    REFERENCE = 3
    """The signal that `NOISE` belongs to: all elements of a cast, the compared elements of a result."""
    NOISE = 4
    SCALES = 5
    ZEROS = 6
    NONFINITE = 7
    UNDERFLOW = 8
    SATURATED = 9
    AMAX = 10
    SMALLEST = 11
    SCALE_MIN = 12
    SCALE_MAX = 13
    WORST_RATIO = 14
    WORST_INDEX = 15
    FOURTH_POWERS = 16
    """The sum of hp^4 over finite hp."""


_COUNTS_AND_EXTREMES = slice(6, 12)
"""The entries that `kernels.cpu.observe` returns before the sum of fourth powers, in its order."""
_SUMS, _MAXIMA, _MINIMA, _WORST = slice(0, 10), slice(10, 14, 3), slice(11, 13), slice(14, 16)
_NAMED_WIDTH = len(TallyIndex)
"""The entries of a tally before its counts of exponents."""
_LOWEST_EXPONENT, _EXPONENTS = -128, 256
EXPONENTS = slice(_NAMED_WIDTH, _NAMED_WIDTH + _EXPONENTS)
TALLY_WIDTH = _NAMED_WIDTH + _EXPONENTS

STATISTICS: tuple[str, ...] = ("numel", "amax", "rms", "smallest", "underflow", "saturated", "sqnr_db", "scale_min")
STATISTICS += ("scale_median", "scale_max", "scale_worst", "scale_worst_sqnr_db", "nonfinite", "zeros", "kurtosis")
"""The statistics of a tally, in the order of a record; docs/monitor.md defines them."""

SIGNIFICANT_DIGITS = {"rms": 7} | dict.fromkeys(
    ("underflow", "saturated", "sqnr_db", "scale_worst_sqnr_db", "zeros", "kurtosis"), 6
)
"""The significant digits of the statistics that are quotients. The other statistics are exact."""

_UNIT_SCALE = torch.ones((), dtype=torch.float64, device="cpu")

INTEGER_STATISTICS = ("numel", "nonfinite", "scale_worst")
"""The statistics that a record writes as integers."""

_CHUNK_ELEMENTS = 1 << 16
"""Elements that the oracle widens to float64 at a time."""


def make_tallies(count: int, device: torch.device) -> Tensor:
    """Return `count` empty tallies, float64 [count, TALLY_WIDTH]."""
    tallies = torch.zeros(count, TALLY_WIDTH, dtype=torch.float64, device=device)
    clear_tallies(tallies)
    return tallies


def clear_tallies(tallies: Tensor) -> None:
    """Empty tallies [..., TALLY_WIDTH] in place."""
    tallies.zero_()
    tallies[..., _MINIMA] = math.inf
    tallies[..., TallyIndex.WORST_RATIO] = -1


def merge_tallies(tallies: Tensor, observed: Tensor) -> None:
    """Add observations to tallies, both [..., TALLY_WIDTH], in place."""
    is_worse = observed[..., _WORST] > tallies[..., TallyIndex.WORST_RATIO, None]
    is_worse = is_worse[..., :1].expand_as(is_worse)
    worst = torch.where(is_worse, observed[..., _WORST], tallies[..., _WORST])
    tallies[..., _SUMS] += observed[..., _SUMS]
    tallies[..., TallyIndex.FOURTH_POWERS] += observed[..., TallyIndex.FOURTH_POWERS]
    tallies[..., EXPONENTS] += observed[..., EXPONENTS]
    tallies[..., _MAXIMA] = torch.maximum(tallies[..., _MAXIMA], observed[..., _MAXIMA])
    tallies[..., _MINIMA] = torch.minimum(tallies[..., _MINIMA], observed[..., _MINIMA])
    tallies[..., _WORST] = worst


def observe_matrix(hp: Tensor, cast: Operand | None) -> Tensor:
    """Return the tally of one matrix [R, C] and of its cast.

    Args:
        hp: float32, bfloat16 or float16, any strides.
        cast: codes [R, C] and scales. If it has no quant_scale, that is the reciprocal of dequant_scale.
    """
    tally = make_tallies(1, hp.device)[0]
    if hp.numel() == 0:
        return tally
    tally[TallyIndex.NUMEL] = hp.numel()
    codes, layout, quant, dequant = None, TENSORWISE, _UNIT_SCALE, _UNIT_SCALE
    if cast is not None:
        codes, layout = cast.data, cast.layout
        dequant = require(cast.dequant_scale, "the dequant_scale").double().contiguous()
        quant = dequant.reciprocal() if cast.quant_scale is None else cast.quant_scale.double().contiguous()
    sums = cpu.observe(hp, codes, quant, dequant, layout) if is_cpu(hp) else None
    if sums is None:
        sums = observe_in_pytorch(hp, codes, quant, dequant, layout.get_block_shape(hp.shape))
    signal, noise, counts = sums
    tally[_COUNTS_AND_EXTREMES], tally[TallyIndex.FOURTH_POWERS] = counts[:-1], counts[-1]
    tally[TallyIndex.SIGNAL] = signal.sum()
    if cast is not None:
        tally[TallyIndex.WITH_CODES], tally[TallyIndex.REFERENCE] = hp.numel(), tally[TallyIndex.SIGNAL]
        tally[TallyIndex.NOISE] = noise.sum()
        add_scales(tally, require(cast.dequant_scale, "the dequant_scale"))
        add_worst_scale(tally, signal.flatten(), noise.flatten())
    return tally


def observe_in_pytorch(
    hp: Tensor, codes: Tensor | None, quant: Tensor, dequant: Tensor, blocks: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the signal and noise of each block, and counts [7], as the oracle of `kernels.cpu.observe`."""
    counts = hp.new_zeros(7, dtype=torch.float64)
    counts[5] = math.inf
    scales = [-(-elements // length) for elements, length in zip(hp.shape, blocks, strict=True)]
    sums = hp.new_zeros((2, *scales), dtype=torch.float64)
    for rows in _iter_row_chunks(hp.shape, blocks[0]):
        wide = hp[rows].double()
        finite = wide.isfinite()
        magnitude = wide.abs().masked_fill_(~finite, 0)
        counts[0] += (wide == 0).sum()
        counts[1] += wide.numel() - finite.sum()
        counts[4] = torch.maximum(counts[4], magnitude.max())
        counts[5] = torch.minimum(counts[5], magnitude.masked_fill(magnitude == 0, math.inf).min())
        first = 0 if blocks[0] >= hp.shape[0] else rows.start // blocks[0]
        squares = magnitude.square()
        counts[6] += squares.square().sum()
        _add_block_sums(sums[0], first, squares, blocks)
        if codes is not None:
            values = codes[rows].double()
            counts[2] += ((values == 0) & (magnitude != 0)).sum()
            scaled = wide * _expand_scales(quant, blocks, rows, hp.shape)
            counts[3] += (scaled.abs() > get_format(codes.dtype).saturates_above).sum()
            noise = (wide - values * _expand_scales(dequant, blocks, rows, hp.shape)).square_()
            noise = noise.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(~finite, 0)
            _add_block_sums(sums[1], first, noise, blocks)
    return sums[0], sums[1], counts


def _iter_row_chunks(shape: torch.Size, block_rows: int) -> Iterator[slice]:
    """Yield slices of rows with about `_CHUNK_ELEMENTS` elements, cut between blocks unless one block has all rows."""
    step = max(_CHUNK_ELEMENTS // max(shape[1], 1), 1)
    if block_rows < shape[0]:
        step = -(-step // block_rows) * block_rows
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _expand_scales(scale: Tensor, blocks: tuple[int, int], rows: slice, shape: torch.Size) -> Tensor:
    """Expand the scales of some rows until they broadcast to the elements."""
    if scale.dim() == 0:
        return scale
    if blocks[0] < shape[0]:
        scale = scale[rows.start // blocks[0] : -(-rows.stop // blocks[0])].repeat_interleave(blocks[0], 0)
        scale = scale[: rows.stop - rows.start]
    return scale if blocks[1] in (1, shape[1]) else scale.repeat_interleave(blocks[1], 1)[:, : shape[1]]


def _add_block_sums(sums: Tensor, first: int, squares: Tensor, blocks: tuple[int, int]) -> None:
    """Add the sums of `squares` [rows, columns] over each block to `sums` [row blocks, column blocks] from `first` on.

    A block with more rows than `squares` is one block.
    """
    rows, columns = min(blocks[0], squares.shape[0]), min(blocks[1], squares.shape[1])
    padding = -squares.shape[0] % rows, -squares.shape[1] % columns
    if any(padding):
        squares = torch.nn.functional.pad(squares, (0, padding[1], 0, padding[0]))
    block_sums = squares.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).sum((1, 3))
    sums[first : first + len(block_sums)] += block_sums


def add_scales(tally: Tensor, dequant_scale: Tensor) -> None:
    """Add scales, float32 of any shape, to a tally. A scale that is not finite counts but has no exponent."""
    scales = dequant_scale.double().flatten()
    if not scales.numel():
        return
    tally[TallyIndex.SCALES] += scales.numel()
    tally[TallyIndex.SCALE_MIN] = torch.minimum(tally[TallyIndex.SCALE_MIN], scales.min())
    tally[TallyIndex.SCALE_MAX] = torch.maximum(tally[TallyIndex.SCALE_MAX], scales.max())
    exponents = torch.frexp(scales)[1].clamp(_LOWEST_EXPONENT + 1, _LOWEST_EXPONENT + _EXPONENTS) - 1
    has_exponent = (scales.isfinite() & (scales > 0)).double()
    tally[EXPONENTS].index_add_(0, exponents.long() - _LOWEST_EXPONENT, has_exponent)


def add_worst_scale(tally: Tensor, signal: Tensor, noise: Tensor) -> None:
    """Keep the index of the scale with the largest noise-to-signal ratio; both are float64 [scales]."""
    ratio = noise / signal  # a block of zeros is 0 / 0
    ratio = torch.where(signal > 0, ratio, torch.where(noise > 0, math.inf, 0.0))
    worst, index = ratio.max(0)
    is_worse = worst > tally[TallyIndex.WORST_RATIO]
    pair = torch.stack([worst, index.double()])
    tally[_WORST] = torch.where(is_worse, pair, tally[_WORST])


ComparedPair = tuple[Tensor, Tensor]
"""A part of a result, and the same part in high precision."""


def observe_result(result: Tensor, compared: Sequence[ComparedPair]) -> Tensor:
    """Return the tally of a result [M, N]."""
    tally = observe_matrix(result, None)
    for actual, reference in compared:
        signal, noise = sum_signal_and_noise(reference, actual)
        tally[TallyIndex.REFERENCE] += signal
        tally[TallyIndex.NOISE] += noise
    return tally


def sum_signal_and_noise(reference: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the squares of a reference and of the differences from it, float64 (), where the reference is finite."""
    wide = reference.double()
    noise = (wide - actual.double()).square_().nan_to_num_(nan=math.inf, posinf=math.inf)
    finite = wide.isfinite()
    return wide.masked_fill(~finite, 0).square().sum(), noise.masked_fill_(~finite, 0).sum()


def spread_indices(length: int, count: int, device: torch.device) -> Tensor:
    """Return at most `count` indices, evenly spread from 0 to `length`."""
    count = min(count, length)
    return torch.arange(count, device=device) * length // max(count, 1)


def normalize_tally(tally: Tensor) -> Float64Array | None:
    """Return a tally's sums per scale and its extremes, which do not depend on how often equal casts were made.

    Returns None for a tally without scales.
    """
    values = tally[:_NAMED_WIDTH].cpu().numpy()
    scales = values[TallyIndex.SCALES]
    return (
        np.concatenate([values[_SUMS] / scales, values[TallyIndex.AMAX : TallyIndex.FOURTH_POWERS]]) if scales else None
    )


def summarize_tallies(tallies: Tensor, weight_numel: Sequence[int | None]) -> dict[str, list[float | None]]:
    """Compute the statistics of tallies [tensors, TALLY_WIDTH] on a CPU: a value per tensor, None if it does not apply.

    `weight_numel` has the size of the whole weight for each cast of a weight, else None. Every rank and
    microbatch casts the weight again, but its elements count once.
    """
    table = tallies.numpy().copy()
    tally = SimpleNamespace(**{index.name.lower(): table[:, index] for index in TallyIndex})
    for position, numel in enumerate(weight_numel):
        if numel and tally.numel[position]:
            share = numel / tally.numel[position]
            table[position, _SUMS] *= share
            tally.fourth_powers[position] *= share
    with np.errstate(all="ignore"):
        has_elements, has_codes, has_scales = tally.numel > 0, tally.with_codes > 0, tally.scales > 0
        finite = tally.numel - tally.nonfinite
        nonzero, has_worst = finite - tally.zeros, has_scales & (tally.worst_ratio >= 0)
        has_sqnr = (tally.reference > 0) | (tally.noise > 0)
        medians = _find_medians(table[:, EXPONENTS], tally.scale_min, tally.scale_max)
        values = {
            "numel": (tally.numel, has_elements),
            "amax": (tally.amax, finite > 0),
            "rms": (np.sqrt(tally.signal / finite), finite > 0),
            "smallest": (tally.smallest, nonzero > 0),
            "underflow": (np.where(nonzero > 0, tally.underflow / nonzero, 0), has_codes),
            "saturated": (tally.saturated / tally.with_codes, has_codes),
            "sqnr_db": (compute_ratio_db(tally.reference, tally.noise), has_sqnr),
            "scale_min": (tally.scale_min, has_scales),
            "scale_median": (medians, has_scales),
            "scale_max": (tally.scale_max, has_scales),
            "scale_worst": (tally.worst_index, has_worst),
            "scale_worst_sqnr_db": (compute_ratio_db(np.ones(len(table)), tally.worst_ratio), has_worst),
            "nonfinite": (tally.nonfinite, has_elements),
            "zeros": (tally.zeros / tally.numel, has_elements),
            "kurtosis": (tally.fourth_powers * finite / tally.signal**2, nonzero > 0),
        }
    return {name: _round_column(name, *values[name]) for name in STATISTICS}


def _round_column(name: str, values: Float64Array, is_defined: NDArray[np.bool_]) -> list[float | None]:
    column: list[float] = values.tolist()
    if name in SIGNIFICANT_DIGITS:
        column = [float(f"{value:.{SIGNIFICANT_DIGITS[name]}g}") for value in column]
    elif name in INTEGER_STATISTICS:
        column = [int(value) for value in column]
    return [value if is_valid else None for value, is_valid in zip(column, is_defined.tolist(), strict=True)]


def compute_ratio_db(signal: Float64Array, noise: Float64Array) -> Float64Array:
    """Compute 10 log10(signal / noise): inf without noise, -inf without signal or if the noise is not finite."""
    with np.errstate(all="ignore"):
        decibels = np.where(noise > 0, 10 * (np.log10(signal) - np.log10(noise)), np.inf)
        return np.where(np.isnan(noise), -np.inf, decibels)


def _find_medians(exponents: Float64Array, smallest: Float64Array, largest: Float64Array) -> Float64Array:
    """Find the lower median of each row's scales from their exponents, clipped to the smallest and largest scale."""
    cumulative = exponents.cumsum(1)
    index = (cumulative >= np.maximum(cumulative[:, -1:] / 2, 0.5)).argmax(1)
    median = np.ldexp(1.0, index + _LOWEST_EXPONENT)
    return np.where(cumulative[:, -1] > 0, np.clip(median, smallest, largest), largest)
