"""`FrozenFloat8Linear` and `FrozenFloat8Experts`: modules whose weights are stored in float8 (linear/frozen_weight.py).

Their state_dicts hold a `FrozenState` for each weight (frozen_state.py), under the name that it has in high precision.
They load those to the bit, and weights in high precision: those that the scales here hold exactly keep these scales,
others are quantized. They also load plain codes with `weight_dequant_scale`, or `gate_up_proj_dequant_scale` and so on,
next to them.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, weights_of_module
from quaver.fsdp.siblings import local_weight
from quaver.linear.frozen_state import FrozenState
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.recipes.formats import FORMATS
from quaver.torch_private.dtensor import distributed_like, is_dtensor, local_shape_and_offset, local_tensor

SCALE_SUFFIX = "_dequant_scale"
"""The suffix that makes the name of a weight that of its scales, where a state_dict has plain codes."""


class FrozenModule(nn.Module):
    """A float8 module whose weights are `FrozenFloat8Weight`s; subclasses multiply by them."""

    def _frozen_weights(self) -> Iterator[tuple[ModuleWeight, FrozenFloat8Weight]]:
        """The weights, each with what this rank has of it."""
        for weight in weights_of_module(self):
            if isinstance(weight.local, FrozenFloat8Weight):
                yield weight, weight.local

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, local in [] if keep_vars else self._frozen_weights():
            destination[prefix + weight.name] = _as(weight.parameter, _state(weight.parameter, local))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        state_dict = dict(state_dict)
        is_transposed = getattr(self, "state_dict_is_transposed", False)
        for weight, local in self._frozen_weights():
            name = prefix + weight.name
            value, scale = state_dict.get(name), None
            if value is None:
                continue
            given = local_tensor(value)
            if not (isinstance(given, FrozenFloat8Weight) and given.has_codes):  # beside these it is unexpected
                scale = state_dict.pop(name + SCALE_SUFFIX, None)
            try:
                value = value.t() if is_transposed and value.dim() == 2 else value
                state_dict[name] = _loadable(local, value, scale, weight)
            except ValueError as error:
                lists[-1].append(f"{name}: {error}")
                del state_dict[name]
                strict = False
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class FrozenFloat8Linear(FrozenModule, Float8Linear):
    """A Float8Linear whose weight is stored in float8; `freeze_to_float8` makes it."""

    @property
    def weight_dequant_scale(self) -> Tensor:
        """float32, (), [N, 1] or one a block; of the whole weight, also where FSDP2 shards it."""
        return typing.cast(FrozenFloat8Weight, local_weight(self)).dequant_scale


class FrozenFloat8Experts(FrozenModule, Float8Experts):
    """A Float8Experts whose weights are stored in float8; `freeze_to_float8` makes it."""


def _loadable(own: FrozenFloat8Weight, value: Tensor, scale: Tensor | None, weight: ModuleWeight) -> Tensor:
    """Make of a state_dict's `value` a frozen weight like `own`, this rank's part of `weight`.

    Raises:
        ValueError: codes, scales or values that `own` cannot have.
    """
    local, power_of_2 = local_tensor(value), weight.config.round_scales_to_power_of_2
    if isinstance(local, FrozenFloat8Weight) and local.has_codes:
        loaded = FrozenFloat8Weight.from_state(*local.state())
    elif isinstance(local, FrozenFloat8Weight) or local.dtype not in FORMATS:
        values = local.to_high_precision() if isinstance(local, FrozenFloat8Weight) else local
        if scale is not None or values.shape != own.shape:
            expected = f"expected float8 codes {list(weight.parameter.shape)} and {weight.name}{SCALE_SUFFIX}"
            raise ValueError(f"{expected}, got {value.dtype} {list(value.shape)}")
        return _as(value, _of_values(own, values, weight.parameter))
    elif scale is None or scale.shape != own.dequant_scale.shape or scale.dtype is not torch.float32:
        expected = f"{weight.name}{SCALE_SUFFIX} {list(own.dequant_scale.shape)} in torch.float32 with float8 codes"
        got = "none" if scale is None else f"{list(scale.shape)} in {scale.dtype}"
        raise ValueError(f"expected {expected}, got {got}")
    else:
        loaded = own.like(local, scale, part=is_dtensor(value))
    own.check_stored_alike(loaded)
    if not loaded.is_meta:
        loaded.check_numbers(power_of_2=power_of_2)
    return _as(value, loaded)


def _of_values(own: FrozenFloat8Weight, values: Tensor, parameter: Tensor) -> FrozenFloat8Weight:
    """A weight of `values` with the scales of `own` where these hold them exactly, else with scales of its own."""
    codes = _state(parameter, own).codes_of(values.to(own.data_fp8.device, own.dtype))
    if codes is not None:
        return own.like(codes)
    if own.is_part:
        raise ValueError(
            "the scales of this base do not hold these values, and a shard cannot have others; load them before "
            "fully_shard, or into a base that was frozen from the same weights"
        )
    quantized = typing.cast(FrozenFloat8Weight, own.clone())
    quantized.write(values)
    return quantized


def _state(parameter: Tensor, local: FrozenFloat8Weight) -> FrozenState:
    state = typing.cast(FrozenState, FrozenState.from_state(*local.state()))
    state.first_row = local_shape_and_offset(parameter)[1][0] if is_dtensor(parameter) else 0
    return state


def _as(weight: Tensor, local: Tensor) -> Tensor:
    """`local` as a DTensor where `weight` is one."""
    return distributed_like(local, weight) if is_dtensor(weight) else local
