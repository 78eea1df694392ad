"""`FrozenFloat8Linear` and `FrozenFloat8Experts`: modules whose weights are stored in float8 (linear/frozen_weight.py).

Their state_dicts hold a `FrozenState` for each weight (frozen_state.py), under its name in the high-precision model.
They load frozen weights bit-exactly. High-precision weights are quantized with the current scales if these represent
them exactly, else with new scales.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, iter_module_weights
from quaver.linear.frozen_state import FrozenState
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.torch_private.dtensor import compute_local_shape_and_offset, get_local_tensor, is_dtensor, make_dtensor_like


class FrozenModule(nn.Module):
    """A float8 module whose weights are `FrozenFloat8Weight`s; subclasses multiply by them."""

    def _iter_frozen_weights(self) -> Iterator[tuple[ModuleWeight, FrozenFloat8Weight]]:
        """Yield each weight with its local tensor."""
        for weight in iter_module_weights(self):
            if isinstance(weight.local_tensor, FrozenFloat8Weight):
                yield weight, weight.local_tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, local in [] if keep_vars else self._iter_frozen_weights():
            state = _make_state(weight.parameter, local)
            destination[prefix + weight.name] = _match_dtensor(state, weight.parameter)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict = dict(state_dict)
        is_transposed = getattr(self, "state_dict_is_transposed", False)
        for weight, local in self._iter_frozen_weights():
            name = prefix + weight.name
            if not isinstance(value := state_dict.get(name), Tensor):
                continue  # missing, or for PyTorch to refuse
            try:
                value = value.t() if is_transposed and value.dim() == 2 else value
                state_dict[name] = _convert_loaded(local, value, weight)
            except ValueError as error:
                error_msgs.append(f"{name}: {error}")
                del state_dict[name]
                strict = False
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class FrozenFloat8Linear(FrozenModule, Float8Linear):
    """A Float8Linear whose weight is stored in float8; `freeze_to_float8` makes it."""

    original_class = nn.Linear


class FrozenFloat8Experts(FrozenModule, Float8Experts):
    """A Float8Experts whose weights are stored in float8; `freeze_to_float8` makes it."""


def _convert_loaded(current: FrozenFloat8Weight, value: Tensor, weight: ModuleWeight) -> Tensor:
    """Convert `value` of a state_dict to a frozen weight in the format of `current`, this rank's part of `weight`.

    Raises:
        ValueError: `current` cannot have these codes, scales or values.
    """
    local = get_local_tensor(value)
    if isinstance(local, FrozenFloat8Weight) and local.has_codes:
        loaded = FrozenFloat8Weight.from_state(*local.get_state())
        current.check_same_format(loaded)
        if not loaded.is_meta:
            loaded.check_codes_and_scales(power_of_2=weight.config.weight_scales_are_powers_of_2)
        return _match_dtensor(loaded, value)
    values = local.to_high_precision() if isinstance(local, FrozenFloat8Weight) else local
    if values.dtype in FLOAT8_FORMATS or values.shape != current.shape:
        raise ValueError(
            f"expected {list(weight.parameter.shape)} in high precision, or a frozen weight's codes with their scales, "
            f"got {value.dtype} {list(value.shape)}"
        )
    codes = _make_state(weight.parameter, current).find_exact_codes(values.to(current.data_fp8.device, current.dtype))
    if codes is not None:
        return _match_dtensor(current.with_codes(codes), value)
    quantized = typing.cast(FrozenFloat8Weight, current.clone())
    quantized.write(values)
    return quantized


def _make_state(parameter: Tensor, local: FrozenFloat8Weight) -> FrozenState:
    state = FrozenState.from_state(*local.get_state())
    state.first_row = compute_local_shape_and_offset(parameter)[1][0] if is_dtensor(parameter) else 0
    return state


def _match_dtensor(local: Tensor, weight: Tensor) -> Tensor:
    """Return `local` as a DTensor if `weight` is one."""
    return make_dtensor_like(local, weight) if is_dtensor(weight) else local
