"""The optimizer state of a parameter: its tensors, their shapes and dtypes, and their values in float32.

    storage     of exp_avg                              of exp_avg_sq
    float8      exp_avg_fp8, exp_avg_scale              exp_avg_sq_root_fp8, exp_avg_sq_root_scale
    bfloat16    exp_avg                                 exp_avg_sq
    float32     exp_avg                                 exp_avg_sq

The table shows the keys of Float8AdamW. Float8Muon stores its momentum_buffer like exp_avg.

Codes are e4m3 in uint8 tensors of the parameter's shape: every backend communicates uint8, and no tool casts it.
Scales are float32, in the shape that `get_scale_shape` returns. The state of a DTensor consists of DTensors with its
placements. Scales are replicated along mesh axes that cut blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from quaver.kernels.stochastic_rounding import round_to_bfloat16
from quaver.optim.blocks import (
    RowSpan,
    explain_block_obstacle,
    find_cut_axes,
    from_blocks,
    get_scale_shape,
    make_grid,
    number_blocks,
    to_blocks,
)
from quaver.optim.cut_blocks import BlockAmaxes, reduce_amaxes, store_scales
from quaver.optim.rounding import (
    dequantize_moment,
    draw_random_bits,
    make_block_keys,
    make_step_key,
    quantize_moment,
    take_high16,
    take_low16,
)
from quaver.optim.update import ParameterBlocks
from quaver.runtime.agreement import find_collective_device
from quaver.runtime.collectives import all_reduce_max
from quaver.torch_private.dtensor import get_local_tensor

STORAGES = ("float8", "bfloat16", "float32")

MIN_FLOAT8_ELEMENTS = 4096
"""Parameters with fewer elements have moments in float32, as in bitsandbytes."""

_STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class MomentKeys(NamedTuple):
    """The keys of a moment in a parameter's state; the key of the scales, `scale`, only if it has scales."""

    values: str
    scale: str | None


_FLOAT8_KEYS = {
    "exp_avg": MomentKeys("exp_avg_fp8", "exp_avg_scale"),
    "exp_avg_sq": MomentKeys("exp_avg_sq_root_fp8", "exp_avg_sq_root_scale"),
    "momentum_buffer": MomentKeys("momentum_buffer_fp8", "momentum_buffer_scale"),
}
"""The keys of float8 moments, by the param group option that sets a moment's storage."""

_NEVER_NEGATIVE = {"step", "exp_avg_sq", *(keys.scale for keys in _FLOAT8_KEYS.values())}
"""The keys of a state whose numbers are 0 or more."""


def is_small(parameter: Tensor) -> bool:
    """Return whether moments are float32 regardless of the options."""
    return parameter.numel() < MIN_FLOAT8_ELEMENTS or parameter.dim() < 2


def choose_storage(parameter: Tensor, wanted: str) -> str:
    """Return how a moment is stored: as `wanted`, or in float32 if the parameter is small or its shards lack scales."""
    is_float32 = is_small(parameter) or (wanted == "float8" and explain_block_obstacle(parameter))
    return "float32" if is_float32 else wanted


class StateLayout(NamedTuple):
    """The global shape and the dtype of each tensor of a parameter's state except the step."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    moments: dict[str, MomentKeys]


def get_layout(parameter: Tensor, group: dict[str, Any]) -> StateLayout:
    """Return the layout that a param group's options ask for."""
    storages = tuple((name, choose_storage(parameter, group[name])) for name in _FLOAT8_KEYS if name in group)
    has_master = parameter.dtype is not torch.float32 and group["masters"] == "float32"
    return _make_layout(tuple(parameter.shape), storages, has_master=has_master)


@functools.lru_cache(4096)  # every step asks several times for each parameter
def _make_layout(shape: tuple[int, ...], storages: tuple[tuple[str, str], ...], *, has_master: bool) -> StateLayout:
    tensors, moments = {}, {}
    for moment, storage in storages:
        keys = _FLOAT8_KEYS[moment] if storage == "float8" else MomentKeys(moment, None)
        tensors[keys.values] = shape, _STORAGE_DTYPES.get(storage, torch.uint8)
        if keys.scale:
            tensors[keys.scale] = get_scale_shape(shape), torch.float32
        moments[moment] = keys
    if has_master:
        tensors["master"] = shape, torch.float32
    return StateLayout(tensors, moments)


def make_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Make the state before the first step: zeros, and the float32 master if the options ask for one."""
    grid = make_grid(parameter)
    local = get_local_tensor(parameter)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, (shape, dtype) in get_layout(parameter, group).tensors.items():
        is_scale = name.endswith("_scale")
        blocks = grid.blocks_per_whole_row if find_cut_axes(parameter) else grid.blocks_per_row
        local_shape = (*local.shape[: len(shape) - 1], blocks) if is_scale else local.shape
        zeros = torch.zeros(local_shape, dtype=dtype, device=local.device)
        state[name] = wrap_local(parameter, zeros, shape, is_scale=is_scale)
    if "master" in state:
        with torch.no_grad():
            get_local_tensor(state["master"]).copy_(local)
    return state


def update_master(parameter: Tensor, master: Tensor) -> None:
    """Copy a parameter into its master, except for elements that are the rounded master already."""
    local, local_master = get_local_tensor(parameter).detach(), get_local_tensor(master)
    local_master.copy_(torch.where(local_master.to(local.dtype) == local, local_master, local.float()))


def wrap_local(parameter: Tensor, local: Tensor, shape: tuple[int, ...], *, is_scale: bool = False) -> Tensor:
    """Wrap `local` in a DTensor of this shape, placed like `parameter` or its scales, if the parameter is a DTensor."""
    if not isinstance(parameter, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    replicated = find_cut_axes(parameter) if is_scale else ()
    placements = [Replicate() if axis in replicated else p for axis, p in enumerate(parameter.placements)]
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def get_local_scales(parameter: Tensor, scale: Tensor) -> Tensor:
    """Return a view of the scales of the blocks that this rank has elements of."""
    local, grid = get_local_tensor(scale), make_grid(parameter)
    return (
        local.narrow(-1, grid.first_row_block if grid.blocks_per_row else 0, grid.blocks_per_row)
        if find_cut_axes(parameter)
        else local
    )


def make_parameter_blocks(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> ParameterBlocks:
    """Return this rank's shard of the parameter, or of its master, and of its moments."""
    moments = get_layout(parameter, group).moments

    def get_local(name: str | None) -> Tensor | None:
        if name is None:
            return None
        return get_local_scales(parameter, state[name]) if name.endswith("_scale") else get_local_tensor(state[name])

    target = state.get("master", parameter)
    return ParameterBlocks(
        get_local_tensor(target).detach(),
        *(get_local(name) for name in (*moments["exp_avg"], *moments["exp_avg_sq"])),  # type: ignore[arg-type]
    )


def read_moments(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the moments in float32, with the parameter's shape and placements."""
    grid, moments = make_grid(parameter), {}
    for moment, keys in get_layout(parameter, group).moments.items():
        local = get_local_tensor(state[keys.values])
        if keys.scale is None:
            values = local.float() if local.dtype is not torch.float32 else local.clone()
        else:
            codes = to_blocks(local.view(grid.rows, grid.columns), grid)
            scales = get_local_scales(parameter, state[keys.scale]).reshape(-1)
            values = from_blocks(dequantize_moment(codes, scales), grid).reshape(local.shape)
            values = values.square() if moment == "exp_avg_sq" else values
        moments[moment] = wrap_local(parameter, values, tuple(parameter.shape))
    return moments


def write_moments(
    parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], moments: dict[str, Tensor], key: int
) -> None:
    """Store moments with the parameter's shape and placements, rounded with the random bits of `key`.

    A collective if ranks share blocks of the parameter.
    """
    grid, layout = make_grid(parameter), get_layout(parameter, group).moments
    bits = draw_random_bits(
        make_block_keys(*number_blocks([RowSpan(grid, 0, grid.rows, key)], get_local_tensor(parameter).device))
    )
    blocks = {}
    for moment in layout:
        values = get_local_tensor(moments[moment]).to(bits.device, torch.float32)
        blocks[moment] = to_blocks(values.reshape(grid.rows, grid.columns), grid)
        if moment == "exp_avg_sq" and layout[moment].scale is not None:
            blocks[moment] = blocks[moment].sqrt()
    amaxes = BlockAmaxes.zeros(parameter, len(blocks)) if find_cut_axes(parameter) and _has_scales(layout) else None
    if amaxes is not None:
        for local, values in zip(amaxes.local, blocks.values(), strict=True):
            local.copy_(values.abs().amax(1).view_as(local))
        (amaxes,) = reduce_amaxes([amaxes])
        store_scales(
            amaxes, get_row_scales(parameter, state, group), torch.ones((), dtype=torch.bool, device=bits.device)
        )
    for index, (moment, keys) in enumerate(layout.items()):
        target, is_root, values = get_local_tensor(state[keys.values]), moment == "exp_avg_sq", blocks[moment]
        bits16 = take_high16(bits) if is_root else take_low16(bits)
        if keys.scale is not None:
            amax = values.abs().amax(1) if amaxes is None else amaxes.local[index].reshape(-1)
            values, scale = quantize_moment(values, amax, bits16, is_root=is_root)
            target_scale = get_local_scales(parameter, state[keys.scale])
            target_scale.copy_(scale.view_as(target_scale))
        elif target.dtype is torch.bfloat16:
            values = round_to_bfloat16(values, bits16)
        target.copy_(from_blocks(values, grid).reshape(target.shape))


def _has_scales(moments: dict[str, MomentKeys]) -> bool:
    return any(keys.scale is not None for keys in moments.values())


def has_cut_blocks(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Return whether a step of the parameter is a collective: ranks share blocks, and blocks have scales."""
    return bool(find_cut_axes(parameter)) and _has_scales(get_layout(parameter, group).moments)


def get_row_scales(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> list[Tensor | None]:
    """Return this rank's scales of whole rows for each moment, or None for a moment without scales."""
    moments = get_layout(parameter, group).moments.values()
    return [None if keys.scale is None else get_local_tensor(state[keys.scale]) for keys in moments]


def check_state(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise ValueError unless a state has the tensors that a param group's options ask for."""
    expected = {"step": ((), torch.float32), **get_layout(parameter, group).tensors}
    for name, (shape, dtype) in expected.items():
        value = state.get(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"only {sorted(state)}"
            raise ValueError(
                f"state of a parameter {list(parameter.shape)}: expected {name} in {dtype} {list(shape)}, got "
                f"{actual}; load it with the parameters and options of the optimizer that saved it"
            )
    if len(state) > len(expected):  # a master of a parameter that is float32 now would be trained instead of it
        raise ValueError(
            f"state of a parameter {list(parameter.shape)}: expected only {sorted(expected)}, got {sorted(state)}; "
            "load it with the parameters and options of the optimizer that saved it"
        )


def check_finite(parameter: Tensor, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if a loaded tensor of a parameter's state has numbers that no step makes, such as NaN.

    A step skips blocks whose moments are not finite, so they would never train again. A collective for a DTensor: all
    ranks raise if one of them has such numbers.
    """
    invalid = torch.stack([_has_invalid(name, get_local_tensor(tensor)).cpu() for name, tensor in tensors.items()])
    if isinstance(parameter, DTensor):
        for group in parameter.device_mesh.get_all_groups():
            invalid = all_reduce_max(invalid.to(find_collective_device(group), torch.float32), group)
    for name, is_invalid in zip(tensors, invalid.tolist(), strict=True):
        if is_invalid:
            expected = f"finite numbers{', 0 or more' if name in _NEVER_NEGATIVE else ''}"
            raise ValueError(
                f"state of a parameter {list(parameter.shape)}: expected {expected}, in {name}, got others; load an "
                "earlier checkpoint"
            )


def _has_invalid(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.uint8:
        return (tensor & 127 == 127).any()  # e4m3's NaNs
    return ~(tensor.isfinite() & (tensor >= 0) if name in _NEVER_NEGATIVE else tensor.isfinite()).all()


def move_state(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move a loaded state to the parameter's device. Its dtypes stay; torch would cast them to the parameter's."""
    loaded = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}
    # The saved optimizer may keep counting in the tensor of its state dict.
    return {**loaded, "step": state["step"].to("cpu", copy=True)}


def convert_torch_state(
    parameter: Tensor, group: dict[str, Any], torch_state: dict[str, Any], position: int
) -> dict[str, Tensor]:
    """Convert a parameter's state from torch's optimizer. torch's Muon counts no steps.

    Raises:
        ValueError: a moment is missing or not finite, or its shape differs from its parameter's.
    """
    moments = {name: torch_state.get(name) for name in get_layout(parameter, group).moments}
    for name, moment in moments.items():
        _check_moment(parameter, name, moment)
    step = torch.as_tensor(torch_state.get("step", 0.0))
    check_finite(parameter, {"step": step, **moments})
    state = make_state(parameter, group)
    state["step"].fill_(float(step))
    write_moments(parameter, state, group, torch_state, make_step_key(group["seed"], int(state["step"]), position))
    return state


def _check_moment(parameter: Tensor, name: str, moment: Any) -> None:
    if (
        not isinstance(moment, Tensor)
        or moment.shape != parameter.shape
        or isinstance(moment, DTensor) != isinstance(parameter, DTensor)
    ):
        actual = f"{type(moment).__name__} {list(moment.shape)}" if isinstance(moment, Tensor) else "none"
        raise ValueError(f"{name}: expected a {type(parameter).__name__} {list(parameter.shape)}, got {actual}")
