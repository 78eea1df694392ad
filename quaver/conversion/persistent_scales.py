"""Delayed and static scaling of a model: sync, calibrate, save, load, report. linear/scale_state.py has the state."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from quaver.linear.module import Float8Linear
from quaver.linear.scale_entries import list_entries, load_slots
from quaver.linear.scale_state import (
    ConversionScaleSlots,
    LinearScaleSlots,
    NamedSlot,
    find_persistent_casts,
    is_calibrated,
)
from quaver.recipes import scaling
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.agreement import check_ranks_agree_once
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import join_names, strip_wrappers
from quaver.runtime.process_group import has_process_group

logger = logging.getLogger(__name__)


def add_persistent_scales(
    model: nn.Module, named_linears: Sequence[tuple[str, Float8Linear]], config: Float8LinearConfig
) -> None:
    """Give these linears of `model` slots for the persistent scales of `config`."""
    if not config.has_persistent_scales or not named_linears:
        return
    owners = find_input_owners([(name, linear.in_features) for name, linear in named_linears], config)
    casts_by_operand = find_persistent_casts(config)
    keys = [((owners.get(name, name), "input"), (name, "weight"), (name, "grad_output")) for name, _ in named_linears]
    casts = {key: cast for key in itertools.chain(*keys) if (cast := casts_by_operand[key[1]]) is not None}
    slots = {key: slot for slot, key in enumerate(casts)}
    device = named_linears[0][1].weight.device
    device = torch.device("cpu") if device.type == "meta" else device
    conversion_slots = ConversionScaleSlots([*casts.values()], config, device)
    for (_, linear), (input, weight, grad_output) in zip(named_linears, keys, strict=True):
        linear_slots = slots.get(input), slots.get(weight), slots.get(grad_output)
        linear.scale_slots = LinearScaleSlots(conversion_slots, linear_slots)


def find_input_owners(named_sizes: Iterable[tuple[str, int]], config: Float8LinearConfig) -> dict[str, str]:
    """Return the sibling whose input scale a linear shares (`shared_inputs`), by the name of the linear.

    Args:
        named_sizes: the fully qualified name and in_features of each linear.
        config: has `shared_inputs`.
    """
    first: dict[tuple[str, tuple[str, ...], int], str] = {}
    owners: dict[str, str] = {}
    for name, in_features in named_sizes:
        parent, _, leaf = name.rpartition(".")
        siblings = next((names for names in config.shared_inputs if leaf in names), None)
        if siblings is not None:
            owner = first.setdefault((parent, siblings, in_features), name)
            if owner != name:
                owners[name] = owner
    return owners


def sync_float8_amax_and_scale_history(
    model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None, *, group: ProcessGroup | None = None
) -> None:
    """Compute the delayed scales of the next step from the amaxes of this one. Call it once a step, after the backward.

    It may run before or after `optimizer.step()`. If it is never called, a RuntimeWarning says so after 1,000 eager
    forwards ([Note: a forgotten sync] in linear/scale_state.py). It does nothing for models without delayed scaling.
    `torch.compile(fullgraph=True)` traces it, with bit-identical results.

    The ranks exchange 8 bytes per tensor in one all-reduce. The number of kernels does not depend on the number of
    tensors. The first eager call, and the next one after a load of scales, checks in a collective of 16 bytes that the
    ranks agree; compiled code does not check.

    Args:
        model: the module that was given to `convert_to_float8_training`, or a module around or inside it.
        fp8_layers: the Float8Linears of `model`; None to find them in its modules.
        group: the ranks with equal scales: all that train this model; with pipeline parallelism, the ranks of one
            stage. None for all ranks of the default process group.
    Raises:
        ValueError: `fp8_layers` has a module that is no Float8Linear.
        RuntimeError: on every rank, if ranks have different tensors, configs or loaded scales, or inside
            `calibrate_float8_static_scales`, whose amaxes the sync would discard.
    """
    check_is_module(model, argument="model")
    layers = list(model.modules() if fp8_layers is None else fp8_layers)
    foreign = [type(layer).__name__ for layer in layers if not isinstance(layer, Float8Linear)]
    if foreign and fp8_layers is not None:
        raise ValueError(f"fp8_layers: expected Float8Linears, got {join_names(foreign)}")
    all_slots = _list_conversion_slots(layers)
    if any(conversion_slots.calibrating for conversion_slots in all_slots):
        raise RuntimeError(
            "sync_float8_amax_and_scale_history would discard the amaxes of calibrate_float8_static_scales: call it "
            "after that block"
        )
    group = _find_group(group)
    if group is not None and not torch.compiler.is_compiling():
        _check_ranks_agree(model, all_slots, group)
    with torch.no_grad():
        for conversion_slots in all_slots:
            conversion_slots.sync(group)


@contextmanager
def calibrate_float8_static_scales(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Measure the static scales of `model` on the batches that run in the block.

    Run forward and backward (or the forward only, if grad_output is not static) as in training. In the block, tensors
    to calibrate are scaled dynamically. At the exit each gets the scale of its largest amax over all ranks, with the
    `headroom` and `margin` of `delayed_scaling_config`. After an exception in the block no collective runs, because
    other ranks may wait in one of the model's: the rank that raised must end.

    Args:
        model, group: as for `sync_float8_amax_and_scale_history`.
    Raises:
        ValueError: the model has no static scale to measure.
        RuntimeError: a block is already open for linears that were converted with `model`'s; on every rank, if ranks
            have different tensors or configs; at the exit, if a tensor was not cast, was all zeros, or was not finite.
            The scales then stay unchanged.
    """
    check_is_module(model, argument="model")
    all_slots = _list_conversion_slots(model.modules())
    if any(conversion_slots.calibrating for conversion_slots in all_slots):
        raise RuntimeError(
            "calibrate_float8_static_scales is already open for this model; leave it before you enter it again"
        )
    group = _find_group(group)
    if group is not None:
        _check_ranks_agree(model, all_slots, group)
    named = [
        (name, conversion_slots, slot)
        for name, conversion_slots, slot in list_named_slots(model)
        if is_calibrated(conversion_slots.casts[slot])
    ]
    if not named:
        raise ValueError("nothing to calibrate: the model has no ScalingType.STATIC cast without a static_quant_scale")
    slots_to_calibrate = {
        conversion_slots: [slot for _, owner, slot in named if owner is conversion_slots]
        for conversion_slots in all_slots
    }  # others stay
    saved_scales = [
        (conversion_slots.quant_scale.clone(), conversion_slots.amax_buffer.clone()) for conversion_slots in all_slots
    ]
    try:
        for conversion_slots, slots in slots_to_calibrate.items():
            conversion_slots.quant_scale[slots] = 0
            conversion_slots.refresh_after_load()
            conversion_slots.calibrating = True
        yield
        amaxes = {conversion_slots: conversion_slots.reduce_amax_buffer(group)[:, 0] for conversion_slots in all_slots}
        _check_measured({name: float(amaxes[conversion_slots][slot]) for name, conversion_slots, slot in named})
        for (scales, _), (conversion_slots, slots) in zip(saved_scales, slots_to_calibrate.items(), strict=True):
            amax, format_max = amaxes[conversion_slots][slots], conversion_slots.format_max[slots]
            scales[slots] = scaling.compute_persistent_scale(
                amax, format_max, conversion_slots.delayed_config, conversion_slots.power_of_2
            )
    finally:
        for (scales, amax_buffer), conversion_slots in zip(saved_scales, all_slots, strict=True):
            conversion_slots.calibrating = False
            conversion_slots.quant_scale.copy_(conversion_slots.round_by_rules(scales))
            conversion_slots.refresh_after_load()
            conversion_slots.amax_buffer.copy_(amax_buffer)


def _check_measured(amaxes: dict[str, float]) -> None:
    unmeasured = [name for name, amax in amaxes.items() if not 0 < amax < float("inf")]
    if unmeasured:
        problem = f"had an amax of {amaxes[unmeasured[0]]}"
        if amaxes[unmeasured[0]] < 0:
            problem = (
                "was not cast. Run its module, and the backward; siblings whose input tensor parallelism gathers for "
                "all of them must be named in Float8LinearConfig.shared_inputs"
            )
        others = f" (and {len(unmeasured) - 1} more)" if len(unmeasured) > 1 else ""
        raise RuntimeError(f"calibration: {unmeasured[0]}{others} {problem}; no scale was changed")


class TensorScaleReport(NamedTuple):
    """The persistent scale of one tensor, compared with its amax in the step before the last sync."""

    name: str
    quant_scale: float
    """The scale of its casts. After a dynamic cast it is computed from amax; without a cast it is the stored scale."""
    is_dynamic: bool
    """Whether it was scaled dynamically, because it had no history."""
    amax: float
    """-1 if it was not cast."""
    used_over_ideal: float
    """The ratio of `quant_scale` to the scale that maps amax to the format's largest number. Above 1 the tensor
    saturates; 2**-n leaves n powers of two unused. It is 1 after a dynamic cast, inf or NaN if amax is, and NaN without
    a cast."""
    saturated: int
    """The largest number of elements that saturated in one cast on one rank. A monitor records their share."""


class Float8ScalingState:
    """The persistent scales of a model by name; a `Stateful` of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        check_is_module(model, argument="model")
        self._named_slots = list_named_slots(model)
        self._conversion_slots = _list_conversion_slots(model.modules())

    def __len__(self) -> int:
        return len(self._named_slots)

    def state_dict(self) -> dict[str, Tensor]:
        """Return `<linear>.<operand>.quant_scale` () and, with delayed scaling, `<linear>.<operand>.amax_history` [H].

        The tensors are float32 views: copying into them loads a state, as torch.distributed.checkpoint does. After a
        sync they are equal on every rank, so they load into any number of ranks. Static scales of the config and the
        amaxes since the last sync are left out: save between a sync and the next forward.
        """
        return list_entries(self._named_slots)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. `quaver.compat.delayed_buffers` reads the buffers of torchao 0.9.

        Tensors without an entry start without a history. A history of another length keeps its newest entries. The log
        says how many entries are missing, and which ones the model has no tensor for.

        Raises:
            RuntimeError: inside `calibrate_float8_static_scales`, whose exit would discard the scales.
            TypeError: `state_dict` is no mapping.
            ValueError: an entry is not a tensor, is on the meta device, has a wrong number of dims, or is a scale of
                inf or NaN; or there are entries, and none is of this model. Nothing is loaded after an error.
        """
        entries = list_entries(self._named_slots)
        load_slots(self._named_slots, state_dict)
        if missing := entries.keys() - state_dict.keys():
            logger.warning(
                "%d of %d entries of persistent scales are not in the checkpoint: their tensors are scaled dynamically "
                "until the first sync (static scales must be calibrated)",
                len(missing),
                len(entries),
            )
        if unexpected := sorted(state_dict.keys() - entries.keys()):
            logger.warning(
                "%d entries of the checkpoint belong to no persistent scale of the model, and are not loaded: %s",
                len(unexpected),
                join_names(unexpected),
            )

    def reset(self) -> None:
        """Forget all histories and measured scales, for example after loading other weights."""
        load_slots(self._named_slots, {})

    def forget_recorded_amaxes(self) -> None:
        """Forget the amaxes since the last sync, for a step that is skipped: they do not enter the next scales."""
        for conversion_slots in self._conversion_slots:
            conversion_slots.reset_amax_buffer()

    def report(self) -> list[TensorScaleReport]:
        """Compare each scale with its amax in the last synced step. Waits for the device."""
        steps = {
            id(conversion_slots): torch.cat([conversion_slots.last_step, conversion_slots.format_max.unsqueeze(1)], 1)
            for conversion_slots in self._conversion_slots
        }
        values = {key: step.tolist() for key, step in steps.items()}
        return [
            _describe_scaling(name, *values[id(conversion_slots)][slot])
            for name, conversion_slots, slot in self._named_slots
        ]


def float8_scaling_state(model: nn.Module) -> Float8ScalingState:
    """Return the delayed and static scales of `model`, to save, load and report.

        torch.save({"model": model.state_dict(), "float8": float8_scaling_state(model).state_dict()}, path)
        dcp.save({"model": ..., "float8": float8_scaling_state(model)}, checkpoint_id=path)

    The model's state_dict does not have them. Names are as in `model.named_modules()`, without the prefixes of wrappers
    (torch.compile, DDP, FSDP1, checkpoint). A model without persistent scales has an empty state.
    """
    return Float8ScalingState(model)


def load_checkpoint_scales(scales: Float8ScalingState, saved: dict[str, Any], source: str) -> None:
    """Load what a trainer's checkpoint has of `scales`. Without an entry they stay, and the log says so."""
    if scales and not saved:
        logger.warning(
            "float8: %s has no persistent scales: the model keeps those that it has, and a tensor without one is "
            "scaled dynamically until the first sync",
            source,
        )
    else:
        scales.load_state_dict(saved)


def _describe_scaling(name: str, scale: float, amax: float, saturated: float, format_max: float) -> TensorScaleReport:
    is_dynamic = not scale > 0
    if amax < 0:
        return TensorScaleReport(name, scale, is_dynamic, amax, float("nan"), 0)
    used_scale = format_max / max(amax, scaling.EPS) if is_dynamic else scale
    used_over_ideal = 1.0 if is_dynamic else scale * amax / format_max
    return TensorScaleReport(name, used_scale, is_dynamic, amax, used_over_ideal, int(saturated))


def list_named_slots(model: nn.Module) -> list[NamedSlot]:
    """Return each slot once, under the name `<linear>.<operand>` of its first linear."""
    slots: dict[tuple[int, int], NamedSlot] = {}
    ddp_prefixes: list[str] = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ddp_prefixes.append(f"{fqn}.module.".removeprefix("."))
        elif isinstance(module, Float8Linear) and isinstance(module.scale_slots, LinearScaleSlots):
            prefix = f"{fqn}." if fqn else ""
            for ddp_prefix in ddp_prefixes:
                if prefix.startswith(ddp_prefix):
                    prefix = ddp_prefix.removesuffix("module.") + prefix.removeprefix(ddp_prefix)
            for name, conversion_slots, slot in module.scale_slots.list_named_slots(strip_wrappers(prefix)):
                slots.setdefault((id(conversion_slots), slot), (name, conversion_slots, slot))
    return list(slots.values())


def _list_conversion_slots(modules: Iterable[nn.Module]) -> list[ConversionScaleSlots]:
    all_slots = {}
    for module in modules:
        if isinstance(module, Float8Linear) and isinstance(module.scale_slots, LinearScaleSlots):
            all_slots[id(module.scale_slots.conversion_slots)] = module.scale_slots.conversion_slots
    return list(all_slots.values())


def _find_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return `group`, by default the group of all ranks; None for one rank."""
    if group is None:
        return dist.group.WORLD if has_process_group() and dist.get_world_size() > 1 else None
    if not torch.compiler.is_compiling() and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup with this rank, got {type(group).__name__}")
    return group


def _check_ranks_agree(model: nn.Module, all_slots: list[ConversionScaleSlots], group: ProcessGroup) -> None:
    """Check that the ranks agree. A rank without persistent scales must take part in the collective."""

    def describe() -> list[str]:
        lines = [
            f"{name} {conversion_slots.casts[slot]}, loaded quant_scale {conversion_slots.loaded_scales[slot]}"
            for name, conversion_slots, slot in list_named_slots(model)
        ]
        return lines + [
            f"{conversion_slots.delayed_config}, powers of two: {conversion_slots.power_of_2}, "
            f"{len(conversion_slots.casts)} tensors converted together"
            for conversion_slots in all_slots
        ]

    fingerprint = [(conversion_slots, conversion_slots.loads) for conversion_slots in all_slots]
    check_ranks_agree_once(model, fingerprint, describe, lambda: [group], subject="the tensors with persistent scales")
