"""The optimizer state of a parameter: its tensors, their shapes and dtypes, and their values in float32.

    storage     of exp_avg                              of exp_avg_sq
    float8      exp_avg_fp8, exp_avg_scale              exp_avg_sq_root_fp8, exp_avg_sq_root_scale
    bfloat16    exp_avg                                 exp_avg_sq
    float32     exp_avg                                 exp_avg_sq

Those are of Float8AdamW; Float8Muon's momentum_buffer is stored as exp_avg is.

Codes are e4m3 as uint8, of the parameter's shape: every backend communicates them, and no tool takes them for numbers
to cast. Scales are float32, of `scale_shape`. Of a DTensor the tensors are DTensors with its placements; scales are
replicated along axes that cut blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from quaver.optim.blocks import (
    RowRange,
    block_numbers,
    cut_axes,
    from_blocks,
    grid_of,
    obstacle_of,
    scale_shape,
    to_blocks,
)
from quaver.optim.cut_blocks import CutPart, agree, store_scales
from quaver.optim.rounding import block_keys, decode, encode, high16, low16, random_bits, round_to_bfloat16
from quaver.optim.update import ParameterBlocks
from quaver.torch_private.dtensor import local_tensor

STORAGES = ("float8", "bfloat16", "float32")

SMALL = 4096
"""Parameters with fewer elements have moments in float32; bitsandbytes' bound."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Names(NamedTuple):
    """The keys of a moment in a parameter's state, by how it is stored; `scale` is None without."""

    values: str
    scale: str | None


_FP8_NAMES = {
    "exp_avg": Names("exp_avg_fp8", "exp_avg_scale"),
    "exp_avg_sq": Names("exp_avg_sq_root_fp8", "exp_avg_sq_root_scale"),
    "momentum_buffer": Names("momentum_buffer_fp8", "momentum_buffer_scale"),
}
"""A param group has an option of the same name for each moment of its optimizer."""


def is_small(parameter: Tensor) -> bool:
    """Whether moments are float32 whatever is wanted."""
    return parameter.numel() < SMALL or parameter.dim() < 2


def storage_of(parameter: Tensor, wanted: str) -> str:
    """How a moment of `parameter` is stored: float32 if it is small or no matrix, or its shards have no scales."""
    if is_small(parameter):
        return "float32"
    return "float32" if wanted == "float8" and obstacle_of(parameter) else wanted


class StateLayout(NamedTuple):
    """The shape and dtype of each tensor of a parameter's state but its step; in whole, not this rank's part."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    moments: dict[str, Names]


def layout_of(parameter: Tensor, group: dict[str, Any]) -> StateLayout:
    """The layout that the options of a param group ask for."""
    shape, tensors, moments = tuple(parameter.shape), {}, {}
    for moment in [name for name in _FP8_NAMES if name in group]:
        storage = storage_of(parameter, group[moment])
        name = _FP8_NAMES[moment] if storage == "float8" else Names(moment, None)
        tensors[name.values] = shape, _DTYPES.get(storage, torch.uint8)
        if name.scale:
            tensors[name.scale] = scale_shape(shape), torch.float32
        moments[moment] = name
    if parameter.dtype is not torch.float32 and group["masters"] == "float32":
        tensors["master"] = shape, torch.float32
    return StateLayout(tensors, moments)


def new_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state before the first step: zeros, and the master if there is one."""
    grid = grid_of(parameter)
    local = local_tensor(parameter)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, (shape, dtype) in layout_of(parameter, group).tensors.items():
        of_blocks = name.endswith("_scale")
        blocks = grid.row_blocks if cut_axes(parameter) else grid.blocks
        here = (*_local_lead(parameter, shape), blocks) if of_blocks else local.shape
        zeros = torch.zeros(here, dtype=dtype, device=local.device)
        state[name] = like_parameter(parameter, zeros, shape, of_blocks=of_blocks)
    if "master" in state:
        with torch.no_grad():
            local_tensor(state["master"]).copy_(local)
    return state


def _local_lead(parameter: Tensor, scale: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(local_tensor(parameter).shape[: len(scale) - 1])


def like_parameter(parameter: Tensor, local: Tensor, shape: tuple[int, ...], *, of_blocks: bool = False) -> Tensor:
    """`local` itself, or a DTensor of this shape with the placements of `parameter`, or of its scales."""
    if not isinstance(parameter, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    replicated = cut_axes(parameter) if of_blocks else ()
    placements = [Replicate() if axis in replicated else each for axis, each in enumerate(parameter.placements)]
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def scales_here(parameter: Tensor, scale: Tensor) -> Tensor:
    """The scales of the blocks of which this rank has elements: a view of its part of the scales."""
    local, grid = local_tensor(scale), grid_of(parameter)
    return local.narrow(-1, grid.first_of_row if grid.blocks else 0, grid.blocks) if cut_axes(parameter) else local


def blocks_of(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> ParameterBlocks:
    """This rank's part of the parameter (or its master) and its moments."""
    moments = layout_of(parameter, group).moments

    def part(name: str | None) -> Tensor | None:
        if name is None:
            return None
        return scales_here(parameter, state[name]) if name.endswith("_scale") else local_tensor(state[name])

    target = state.get("master", parameter)
    return ParameterBlocks(
        local_tensor(target).detach(),
        *(part(name) for name in (*moments["exp_avg"], *moments["exp_avg_sq"])),  # type: ignore[arg-type]
    )


def read_moments(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    """The moments in float32, of the parameter's shape and placements."""
    grid, moments = grid_of(parameter), {}
    for moment, names in layout_of(parameter, group).moments.items():
        local = local_tensor(state[names.values])
        if names.scale is None:
            values = local.float() if local.dtype is not torch.float32 else local.clone()
        else:
            codes = to_blocks(local.view(grid.rows, grid.columns), grid)
            values = from_blocks(decode(codes, scales_here(parameter, state[names.scale]).reshape(-1)), grid).reshape(
                local.shape
            )
            values = values.square() if moment == "exp_avg_sq" else values
        moments[moment] = like_parameter(parameter, values, tuple(parameter.shape))
    return moments


def write_moments(
    parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], moments: dict[str, Tensor], key: int
) -> None:
    """Store the moments, of the parameter's shape and placements, with the random bits of `key`.

    A collective, if ranks share blocks of the parameter.
    """
    grid, layout = grid_of(parameter), layout_of(parameter, group).moments
    bits = random_bits(block_keys(*block_numbers([RowRange(grid, 0, grid.rows, key)], local_tensor(parameter).device)))
    blocks = {}
    for moment in layout:
        values = local_tensor(moments[moment]).to(bits.device, torch.float32)
        blocks[moment] = to_blocks(values.reshape(grid.rows, grid.columns), grid)
        if moment == "exp_avg_sq" and layout[moment].scale is not None:
            blocks[moment] = blocks[moment].sqrt()
    amaxes = CutPart.of(parameter, len(blocks)) if cut_axes(parameter) and _has_scales(layout) else None
    if amaxes is not None:
        for own, values in zip(amaxes.own, blocks.values(), strict=True):
            own.copy_(values.abs().amax(1).view_as(own))
        (amaxes,) = agree([amaxes])
        store_scales(
            amaxes, scales_of_rows(parameter, state, group), torch.ones((), dtype=torch.bool, device=bits.device)
        )
    for index, (moment, names) in enumerate(layout.items()):
        to, is_root, values = local_tensor(state[names.values]), moment == "exp_avg_sq", blocks[moment]
        noise = high16(bits) if is_root else low16(bits)
        if names.scale is not None:
            amax = values.abs().amax(1) if amaxes is None else amaxes.own[index].reshape(-1)
            values, scale = encode(values, amax, noise, is_root)
            here = scales_here(parameter, state[names.scale])
            here.copy_(scale.view_as(here))
        elif to.dtype is torch.bfloat16:
            values = round_to_bfloat16(values, noise)
        to.copy_(from_blocks(values, grid).reshape(to.shape))


def _has_scales(moments: dict[str, Names]) -> bool:
    return any(names.scale is not None for names in moments.values())


def shares_blocks(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a step of the parameter is a collective: ranks share blocks, and blocks have scales."""
    return bool(cut_axes(parameter)) and _has_scales(layout_of(parameter, group).moments)


def scales_of_rows(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> list[Tensor | None]:
    """This rank's tensor of scales of each moment, None where it has none."""
    names = layout_of(parameter, group).moments.values()
    return [None if each.scale is None else local_tensor(state[each.scale]) for each in names]
