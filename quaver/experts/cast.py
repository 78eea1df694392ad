"""Casts to float8 of a matrix whose rows belong to groups (groups.py), each with scales of its own.

On a CPU each group is cast by the table of casts (kernels/cast.py). Elsewhere PyTorch casts all groups at once: amaxes
of rows, reduced by group; no number leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver import scaling
from quaver.config import CastConfig, ScalingGranularity
from quaver.experts.groups import (
    ALL,
    Block,
    GroupedOperand,
    GroupedOperands,
    blocks_of,
    bounds_of,
    count_of_scales,
    first_scale,
    places_of_rows,
    shape_of_scales,
)
from quaver.formats import FORMATS
from quaver.kernels import cpu
from quaver.kernels.cast import CASTS
from quaver.kernels.operation import operation
from quaver.kernels.places import NONE, Places
from quaver.phases import phase

# ---- the reference ---------------------------------------------------------------------------------------------------


def _cast_groups(
    hp: Tensor,
    float8_dtype: torch.dtype,
    ends: Tensor | None,
    groups: int,
    row: bool,
    column: bool,
    power_of_2: bool,
    granularity: str,
    dot_products: int,
    length: int,
    mode: str,
) -> Places:
    """Quantize groups of rows, for one or both of their matmuls.

    Args:
        hp: [rows, columns].
        ends, groups: see groups.py.
        granularity: of `ScalingGranularity`; with "blockwise", the rest is as for `cast_blockwise`.
    Returns:
        The six places of kernels/cast.py, with the scales of groups.py. Where both directions have one cast,
        the row's places serve both.
    """
    cpu.check_memory(hp, ends)

    def cast(block: Block) -> Places:
        rows, columns = block
        count = count_of_scales(rows, groups, hp.shape[0])
        place = places_of_rows(ends, groups, hp.shape[0], rows, hp.device)
        amax = amax_of_places(hp, place, count, columns)
        if granularity == ScalingGranularity.BLOCKWISE.value:
            quant, dequant = scaling.scales_of_blocks(amax, float8_dtype, power_of_2, mode)
        else:
            quant, dequant = scaling.scales_of(amax, float8_dtype, power_of_2)
        of_rows = quant[place]
        if columns > 1:
            of_rows = of_rows.repeat_interleave(columns, 1)[:, : hp.shape[1]]
        largest = FORMATS[float8_dtype].max
        codes = (hp.float() * of_rows).clamp_(-largest, largest).to(float8_dtype)
        is_tensorwise = block == (ALL, ALL)
        return codes, *(s[:count, 0] if is_tensorwise else s[:count] for s in (quant, dequant))

    return _in_directions(cast, blocks_of(granularity, (dot_products, length)), row, column)


def _in_directions(cast: Callable[[Block], Places], blocks: tuple[Block, Block], row: bool, column: bool) -> Places:
    if blocks[0] == blocks[1]:
        return *cast(blocks[0]), *NONE
    return *(cast(blocks[0]) if row else NONE), *(cast(blocks[1]) if column else NONE)


def amax_of_places(hp: Tensor, place: Tensor, count: int, columns: int) -> Tensor:
    """The amax of each place, float32 [count + 1, blocks of columns]; the last place takes rows of no group."""
    width = columns or max(hp.shape[1], 1)
    bits = hp.float().abs().view(torch.int32)  # they order as the magnitudes do, NaNs on top
    bits = F.pad(bits, (0, -hp.shape[1] % width)).unflatten(1, (-1, width)) if hp.shape[1] else bits[:, :, None]
    bits = bits.amax(2) if bits.shape[2] else bits.new_zeros(bits.shape[:2])
    amaxes = bits.new_zeros(count + 1, bits.shape[1])
    return amaxes.scatter_reduce(0, place[:, None].expand(bits.shape), bits, "amax").view(torch.float32)


def _fake_groups(
    hp: Tensor,
    float8_dtype: torch.dtype,
    ends: Tensor | None,
    groups: int,
    row: bool,
    column: bool,
    power_of_2: bool,
    granularity: str,
    dot_products: int,
    length: int,
    mode: str,
) -> Places:
    """Shapes only."""

    def cast(block: Block) -> Places:
        return hp.new_empty(hp.shape, dtype=float8_dtype), *_new_scales(hp, block, groups)

    return _in_directions(cast, blocks_of(granularity, (dot_products, length)), row, column)


def _new_scales(hp: Tensor, block: Block, groups: int) -> tuple[Tensor, Tensor]:
    """Zeros for quant_scale and dequant_scale."""
    quant = hp.new_zeros(shape_of_scales(block, groups, *hp.shape), dtype=torch.float32)
    return quant, torch.zeros_like(quant)


# ---- CPU -------------------------------------------------------------------------------------------------------------


def _cpu_groups(
    hp: Tensor,
    float8_dtype: torch.dtype,
    ends: Tensor | None,
    groups: int,
    row: bool,
    column: bool,
    power_of_2: bool,
    granularity: str,
    *block_options: Any,
) -> Places | None:
    """By the table of casts, each group as a matrix; what does not depend on groups, in one."""
    if not cpu.takes(hp, float8_dtype):
        return None
    name = ScalingGranularity(granularity)
    options = block_options if name is ScalingGranularity.BLOCKWISE else ()
    bounds = bounds_of(ends, groups, hp.shape[0])
    blocks = blocks_of(granularity, block_options)

    def cast_by_group(block: Block, column: bool) -> Places:
        codes, scales = torch.empty_like(hp, dtype=float8_dtype), _new_scales(hp, block, groups)
        for group, (start, stop) in enumerate(bounds):
            places = CASTS[name](hp[start:stop], float8_dtype, not column, column, power_of_2, *options)
            made = places[3:] if column else places[:3]
            codes[start:stop] = made[0]
            first = first_scale(block[0], group, start)
            for scale, of_group in zip(scales, made[1:], strict=True):
                scale[first : first + (of_group.shape[0] if of_group.dim() else 1)] = of_group
        codes[bounds[-1][1] :].view(torch.uint8).zero_()
        return codes, *scales

    if blocks[0] == blocks[1]:
        return *cast_by_group(blocks[0], False), *NONE
    places: list[Any] = []
    if row and blocks[0][0] == 1:
        places += CASTS[name](hp, float8_dtype, True, False, power_of_2, *options)[:3]
    else:
        places += cast_by_group(blocks[0], False) if row else NONE
    return *places, *(cast_by_group(blocks[1], True) if column else NONE)


_operation = operation(_cast_groups, results=6, cpu=_cpu_groups, fake=_fake_groups)


@phase("quaver::cast")
def cast_groups(
    hp: Tensor, cast: CastConfig, ends: Tensor | None, groups: int, row: bool, column: bool, power_of_2: bool
) -> GroupedOperands:
    """Quantize groups of rows by one cast; a disabled one gives `hp` itself.

    Args:
        hp: [rows, columns], contiguous.
        ends, groups: see groups.py.
    """
    if cast.is_disabled:
        operand = GroupedOperand(hp)
        return GroupedOperands(operand if row else None, operand if column else None)
    granularity = cast.scaling_granularity.value
    options = cast.block_options or (0, 0, "")
    places = _operation(hp, cast.float8_dtype, ends, groups, row, column, power_of_2, granularity, *options)
    blocks = blocks_of(granularity, options)
    of_row = of_column = GroupedOperand(places[0], places[2], blocks[0][0])
    if blocks[0] != blocks[1]:
        of_column = GroupedOperand(places[3], places[5], blocks[1][0])
    return GroupedOperands(of_row if row else None, of_column if column else None)
