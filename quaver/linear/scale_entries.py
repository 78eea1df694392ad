"""The entries of persistent scales in a checkpoint: listed as views of `ConversionScaleSlots`, loaded all or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.linear.scale_state import NamedSlot, is_calibrated
from quaver.recipes.config import ScalingType
from quaver.runtime.module_names import join_names
from quaver.torch_private.tracing import FakeTensor


def list_entries(named_slots: Iterable[NamedSlot]) -> dict[str, Tensor]:
    """Return views `<name>.quant_scale` () and `<name>.amax_history` [H]; none if the config gives the scale."""
    entries: dict[str, Tensor] = {}
    for name, conversion_slots, slot in named_slots:
        cast = conversion_slots.casts[slot]
        is_delayed = cast.scaling_type is ScalingType.DELAYED
        if is_delayed or is_calibrated(cast):
            entries[f"{name}.quant_scale"] = conversion_slots.quant_scale[slot]
        if is_delayed:
            entries[f"{name}.amax_history"] = conversion_slots.history[slot]
    return entries


@torch.no_grad()
def load_slots(named_slots: Sequence[NamedSlot], saved: Mapping[str, Any]) -> None:
    """Copy `saved` into `list_entries(named_slots)`, and zeros (a cold start) into missing entries.

    A history of another length keeps its newest amaxes. A negative scale is loaded as unknown.

    Raises:
        RuntimeError: static scales are being calibrated.
        TypeError: `saved` is no mapping.
        ValueError: an entry is not a tensor of floating point with values, has another number of dims, or is not finite
            in float32; nothing is loaded. Infinite amaxes are loaded with `nonfinite_amax="keep_scale"`, which saves
            them. Or `saved` has entries, and none is of these slots.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict: expected a mapping from names to tensors, got {type(saved).__name__}")
    if any(conversion_slots.calibrating for _, conversion_slots, _ in named_slots):
        raise RuntimeError("calibrate_float8_static_scales would discard the loaded scales: load them after that block")
    entries = list_entries(named_slots)
    if saved and entries and not entries.keys() & saved.keys():
        raise ValueError(
            f"state_dict: expected names such as {next(iter(entries))}, got {join_names([*map(str, saved)])}; pass the "
            "entry that float8_scaling_state(model).state_dict() returned"
        )
    may_be_infinite = all(
        conversion_slots.delayed_config.nonfinite_amax == "keep_scale" for _, conversion_slots, _ in named_slots
    )
    sources = {
        name: _convert_entry(name, saved[name], view.dim(), may_be_infinite=may_be_infinite and view.dim() > 0)
        for name, view in entries.items()
        if name in saved
    }
    loaded: dict[str, Tensor] = {}
    for name, view in entries.items():
        source = sources.get(name, view.new_zeros(()))
        if view.dim() and source.dim() and len(source) != len(view):
            source = torch.cat([view.new_zeros(len(view)), source.to(view.device)])[-len(view) :]
        loaded[name] = torch.empty_like(view).copy_(source.clamp(min=0))  # may fail, so before the first write
    for name, view in entries.items():
        view.copy_(loaded[name])
    for conversion_slots in {id(conversion_slots): conversion_slots for _, conversion_slots, _ in named_slots}.values():
        conversion_slots.record_load()


def _convert_entry(name: str, entry: Any, dims: int, *, may_be_infinite: bool) -> Tensor:
    """Return a checked entry in float32, the dtype of the state."""
    if not isinstance(entry, Tensor) or entry.dim() != dims:
        got = entry.dim() if isinstance(entry, Tensor) else "no tensor"
        raise ValueError(f"{name}: expected a tensor of {dims} dims, got {got}")
    if not entry.is_floating_point():
        raise ValueError(f"{name}: expected floating point, got {entry.dtype}")
    has_value = not isinstance(entry, FakeTensor)
    if has_value and entry.is_meta:
        raise ValueError(f"{name}: expected a tensor with values, got one on the meta device")
    converted = entry.float()
    is_bad = converted.isnan() if may_be_infinite else ~converted.isfinite()
    if has_value and bool(is_bad.any()):
        expected = "a finite scale" if dims == 0 else "amaxes but NaN" if may_be_infinite else "finite amaxes"
        value = entry[is_bad][0].item()
        raise ValueError(f"{name}: expected {expected} in float32, got {value}; load an earlier checkpoint")
    return converted
