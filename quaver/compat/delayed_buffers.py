"""Loads checkpoints of torchao 0.9's delayed scaling, which hold its scales as buffers of the linears (`fp8_*`).

    model.load_state_dict(load_delayed_buffers(model, torch.load("torchao_0.9.pt")))

Without this function the buffers are unexpected keys for `load_state_dict`, as they are for torchao since 0.10.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quaver.conversion.persistent_scales import float8_scaling_state, list_named_slots
from quaver.recipes.scaling import compute_persistent_scale
from quaver.runtime.module_names import strip_wrappers

logger = logging.getLogger(__name__)

_BUFFER_NAME = re.compile(r"(.*\.)?fp8_(amax|amax_history|scale)_(input|weight|grad_output|x|w|dL_dY)")
_FLOAT8_EXPERIMENTAL_NAMES = {"input": "x", "weight": "w", "grad_output": "dL_dY"}


def load_delayed_buffers(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Load the `fp8_*` buffers of a whole state dict into the persistent scales of `model`, and return the rest.

    It reads the buffers of torchao 0.9 and of float8_experimental, whose histories begin with the newest amax. Scales
    are computed from the histories, because torchao may cast to another format. Operands that torchao never cast, or
    scaled dynamically, have buffers with a scale of 1; their scales stay unknown. For a model without delayed
    scaling, the buffers are dropped and a warning is logged.

    Returns:
        A new dict for `model.load_state_dict`, without these buffers.
    Raises:
        ValueError: a history is empty or no vector, or its scale is not a tensor of one number.
    """
    remaining = {key: value for key, value in state_dict.items() if not _BUFFER_NAME.fullmatch(key)}
    if len(remaining) == len(state_dict):
        return dict(state_dict)
    entries = _convert_buffers(
        model, {strip_wrappers(key): value for key, value in state_dict.items() if key not in remaining}
    )
    if entries:
        float8_scaling_state(model).load_state_dict(entries)
    else:
        logger.warning("dropped the fp8_* buffers of a checkpoint of delayed scaling: the model has no scale for them")
    return remaining


def _convert_buffers(model: nn.Module, buffers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers as entries of `Float8ScalingState.load_state_dict`."""
    entries: dict[str, Tensor] = {}
    for name, conversion_slots, slot in list_named_slots(model):
        operand = name.rpartition(".")[2]
        prefix = name.removesuffix(operand)
        for old_name in (operand, _FLOAT8_EXPERIMENTAL_NAMES[operand]):
            history = buffers.get(f"{prefix}fp8_amax_history_{old_name}")
            scale = buffers.get(f"{prefix}fp8_scale_{old_name}")
            if history is not None and scale is not None:
                are_tensors = isinstance(history, Tensor) and isinstance(scale, Tensor)
                if not are_tensors or history.dim() != 1 or not history.numel() or scale.numel() != 1:
                    got = f"{list(history.shape)} with {list(scale.shape)}" if are_tensors else f"{history}, {scale}"
                    raise ValueError(
                        f"{prefix}fp8_amax_history_{old_name}: expected a vector of amaxes with one scale, got {got}"
                    )
                is_recorded = (scale != 1) & history.isfinite()
                history = torch.where(is_recorded, history, 0).flip(0).to(conversion_slots.quant_scale)
                quant_scale = compute_persistent_scale(
                    history.max(),
                    conversion_slots.format_max[slot],
                    conversion_slots.delayed_config,
                    conversion_slots.power_of_2,
                )
                entries[f"{name}.quant_scale"] = torch.where(history.max() > 0, quant_scale, 0)
                entries[f"{name}.amax_history"] = history
    return entries
