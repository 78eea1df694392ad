"""The persistent scales of a model: the state of delayed and static scaling, and the sync that updates it.

`ConversionScaleSlots` holds T slots for the linears of one conversion. A slot is one operand (input, weight, or
grad_output).

    quant_scale [T]      the factor of the casts; 0 while it is unknown, and each cast computes one from its own amax
    amax_buffer [T, 2]   largest amax and most saturated elements since the last sync; -1 before the first cast
    history     [T, H]   the amaxes of the last H steps, newest last; 0 before the first one

Casts use quant_scale and update amax_buffer by a maximum, without another read. A maximum is idempotent, so
recomputation, microbatches and modules that run several times need no bookkeeping. Scales change only in a sync, so a
recomputation is bit-identical to its forward. The sync, once per step after the backward, takes the maximum over ranks,
appends it to the history and computes the next scales (`DelayedScalingConfig` has the formula). A slot that no rank
cast in this step is unchanged. Slots are not module buffers: state dicts stay nn.Linear's, and neither DDP nor FSDP
sends them.

[Note: known scales] Code compiled for a GPU can fuse a cast with the producer of the matrix once the scale is known;
before, the cast reads the matrix twice. It guards on `PersistentScale.is_known_to_compiler`, so a change recompiles it
once. On a CPU the flag stays False, because PyTorch 2.11 guards on all fields of the arguments, read or not. The host
sets the flag when slots are loaded and after eager syncs. While a scale is unknown the host reads the device only after
the 1st, 2nd, 4th, 8th, ... sync. So a slot that is never cast costs few waits and delays no other slot. Ranks agree,
because scales are equal on every rank after a sync. Their collectives do not depend on the flag. docs/design/0022 lists
changes that the flag misses.

[Note: who records] Casts record amaxes in every forward that records gradients, whatever the mode of its module. Its
backward uses the scales, so they must be updated, also in a layer that is in eval mode while others train. A weight
that is quantized before the forward (by `cast_weights_once`, or for an all-gather) may be used in evaluation and in
training. So its cast records into a separate buffer. Every forward that records gradients merges the maximum of
this buffer into amax_buffer.

[Note: a forgotten sync] The slots count the forwards that record gradients since the last sync and warn at a number
far above a step's microbatches. If a weight's version changed between two of them, an optimizer has stepped without a
sync, which `assert_float8_training` reports. The weights that FSDP2 gathers keep their version. Until the first sync
nothing saturates, because each cast computes a scale from its own amax. Compiled forwards are not counted.

[Note: stale scales] Every change of a scale writes `quant_scale` in place or replaces it. All views share its version
counter, which compiled code increments too, so a cached cast is valid while its `PersistentScale` is the same
object with the same `quant_scale._version`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver.kernels.persistent_cast import update_amax_buffer
from quaver.recipes import scaling
from quaver.recipes.config import CastConfig, Float8LinearConfig, ScalingType
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.scale_rules import invert_twice
from quaver.recipes.scaling import PersistentScale, PersistentScales
from quaver.runtime.collectives import NO_AMAX, all_reduce_max
from quaver.runtime.devices import add_device_index, is_capturing, is_cpu
from quaver.runtime.warnings import warn_user
from quaver.torch_private.tracing import FakeTensor
from quaver.torch_private.versions import get_version

OPERANDS = ("input", "weight", "grad_output")

MAX_FORWARDS_WITHOUT_SYNC = 1000
"""A linear's training forwards without a sync before the warning: more than the microbatches of a step."""
_ATTRIBUTES_RESET_IN_COPIES = ("linear_slots", "_persistent")
"""Attributes of a `ConversionScaleSlots` that copies do not get."""


class TrainingForwards:
    """The training forwards of the linears of one conversion since the last sync; see [Note: a forgotten sync]."""

    count: int
    """The number of forwards of all linears."""
    is_sync_forgotten: bool
    """Whether a weight changed between two forwards of its linear."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count, self.is_sync_forgotten = 0, False
        self._weight_versions: dict[int, int] = {}

    def add(self, linear: int, weight: Tensor | None) -> None:
        """Count a forward, and compare the version of `weight` with that in the first one. `linear`: any unique id."""
        self.count += 1
        if weight is not None and not weight.is_inference():
            version = get_version(weight)
            self.is_sync_forgotten |= version != self._weight_versions.setdefault(linear, version)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "count": 0, "_weight_versions": {}}  # the keys of versions are ids of this process


class ConversionScaleSlots:
    """The persistent scales of the linears of one conversion; the top of the file describes its tensors.

    Attributes:
        quant_scale, amax_buffer, history: float32 [T], [T, 2], [T, H], on the device of the linears.
        last_step: float32 [T, 3], quant_scale and amax_buffer over all ranks before the last sync, for reports.
        is_known: bool [T] on the CPU, a copy of quant_scale > 0. Read only where ranks decide on the host.
        is_known_to_compiler: whether each of the T scales is known; see [Note: known scales].
        syncs_with_unknown_scales: eager syncs with an unknown scale since slots were loaded.
        has_unknown_static: whether a static scale has not been measured.
        loads: how often slots were loaded or reset.
        loaded_scales: quant_scale after the last load, 0 where unknown; with `loads` it shows ranks that load alone.
        calibrating: whether static scales are being measured.
        ranks_read_is_known: whether ranks read is_known to decide which amaxes they exchange, so each sync updates it.
        forwards: the training forwards since the last sync.
    """

    @torch.inference_mode(False)
    def __init__(self, casts: Sequence[CastConfig], config: Float8LinearConfig, device: torch.device) -> None:
        """Make one slot for each of `casts`."""
        self.casts = tuple(casts)
        self.delayed_config = config.delayed_scaling_config
        self.power_of_2 = config.round_scales_to_power_of_2
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        count = len(casts)
        self.quant_scale = torch.tensor([cast.static_quant_scale or 0.0 for cast in casts], **options)
        self.quant_scale = self.round_by_rules(self.quant_scale)
        self.amax_buffer = torch.empty(count, 2, **options)
        self.history = torch.zeros(count, self.delayed_config.history_len, **options)
        self.format_max = torch.tensor([FLOAT8_FORMATS[cast.float8_dtype].max for cast in casts], **options)
        self.has_delayed = any(cast.scaling_type is ScalingType.DELAYED for cast in casts)
        self.is_delayed = torch.tensor([cast.scaling_type is ScalingType.DELAYED for cast in casts], device=device)
        self.is_known = torch.zeros(count, dtype=torch.bool, device="cpu")
        self.is_known_to_compiler = [False] * count
        self.syncs_with_unknown_scales = 0
        self._reset_views()
        self.forwards = TrainingForwards()
        self.loads, self.loaded_scales = 0, [0.0] * count
        self.calibrating = False
        self.ranks_read_is_known = False
        self.refresh_after_load()
        self.last_step = torch.cat([self.quant_scale.unsqueeze(1), self.amax_buffer], 1)

    def round_by_rules(self, quant_scale: Tensor) -> Tensor:
        """Round scales that follow a scale rule as inference engines store them (`scale_rules.invert_twice`)."""
        by_rule = [cast.scale_rule is not None for cast in self.casts]
        if not any(by_rule):
            return quant_scale
        return torch.where(torch.tensor(by_rule, device=quant_scale.device), invert_twice(quant_scale), quant_scale)

    def _reset_views(self) -> None:
        self.linear_slots: list[LinearScaleSlots] = []
        self._persistent: dict[tuple[int, bool], PersistentScale] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _ATTRIBUTES_RESET_IN_COPIES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_views()

    @property
    def device(self) -> torch.device:
        return self.quant_scale.device

    @property
    def calibrated_slots(self) -> list[int]:
        """The slots whose static scale is measured, not given by the config."""
        return [slot for slot, cast in enumerate(self.casts) if is_calibrated(cast)]

    def get_persistent_scale(self, slot: int | None, *, record: bool) -> PersistentScale | None:
        """Return the view of one slot, or None for None. Linears that share a slot get the same object."""
        if slot is None:
            return None
        if (slot, record) not in self._persistent:
            buffer = self.amax_buffer[slot] if record else None
            self._persistent[slot, record] = PersistentScale(
                self.quant_scale[slot],
                buffer,
                self.is_known[slot],
                self.is_known_to_compiler[slot] and not is_cpu(self.quant_scale),
                None if buffer is None else tuple(buffer[i] for i in range(2)),
            )
        return self._persistent[slot, record]

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Move to another device; views follow."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "is_known":
                setattr(self, name, value.to(device))
        self._renew_views()

    @torch.inference_mode(False)
    def _renew_views(self) -> None:
        self._persistent.clear()
        for slots in self.linear_slots:
            slots.renew_views()

    def sync(self, group: ProcessGroup | None) -> None:
        """Compute the next scales of the delayed slots: a fixed number of kernels, and one all-reduce with a group.

        Traceable without graph breaks: compiled code reads no tensor on the host, except where `ranks_read_is_known`.
        """
        config = self.delayed_config
        recorded_amax = self.reduce_amax_buffer(group)
        amax = recorded_amax[:, 0]
        recorded = self.is_delayed & ~(amax < 0)  # NaN is recorded, too
        if config.nonfinite_amax == "skip":
            recorded &= amax.isfinite()
        shifted = torch.cat([self.history[:, 1:], amax.unsqueeze(1)], 1)
        self.history.copy_(torch.where(recorded.unsqueeze(1), shifted, self.history))
        largest = self.history.amax(1) if config.scale_fn_name == "max" else self.history[:, -1]
        usable = recorded & (largest > 0) & largest.isfinite()
        scale = scaling.compute_persistent_scale(largest, self.format_max, config, self.power_of_2)
        self.last_step.copy_(torch.cat([self.quant_scale.unsqueeze(1), recorded_amax], 1))
        self.quant_scale.copy_(torch.where(usable, scale, self.quant_scale))
        self.reset_amax_buffer()
        if not torch.compiler.is_compiling():
            self._refresh_known_after_sync()
        elif self.ranks_read_is_known:
            self.is_known.copy_(self.quant_scale > 0)
        self.forwards.reset()

    def _refresh_known_after_sync(self) -> None:
        """Count a sync with unknown scales, and in the syncs of [Note: known scales] read which are known now."""
        if all(self.is_known_to_compiler):
            return
        self.syncs_with_unknown_scales += 1
        # With an outdated flag, ranks that decide on the host would exchange amaxes of a known scale.
        if self.ranks_read_is_known or (self.syncs_with_unknown_scales.bit_count() == 1 and not is_capturing()):
            self.refresh_known()

    def reduce_amax_buffer(self, group: ProcessGroup | None) -> Tensor:
        """Return the maximum of `amax_buffer` over the ranks of `group`; NaN if one rank has a NaN."""
        return self.amax_buffer if group is None else all_reduce_max(self.amax_buffer, group, allow_missing=True)

    def reset_amax_buffer(self) -> None:
        self.amax_buffer.fill_(NO_AMAX)

    def refresh_known(self) -> None:
        self.is_known.copy_(self.quant_scale > 0)
        is_fake = isinstance(self.is_known, FakeTensor)  # predictions assume known scales
        known = [True] * len(self.is_known_to_compiler) if is_fake else self.is_known.tolist()
        if known != self.is_known_to_compiler:
            self.is_known_to_compiler = known
            self._renew_views()

    def count_forward(self, linear: int, weight: Tensor | None) -> None:
        """Count a forward that records gradients, and warn after `MAX_FORWARDS_WITHOUT_SYNC` for each linear.

        `linear`: the id of its `LinearScaleSlots`.
        """
        self.forwards.add(linear, weight if self.has_delayed else None)
        if self.forwards.count == MAX_FORWARDS_WITHOUT_SYNC * len(self.linear_slots) and self.has_delayed:
            warn_user(
                f"{MAX_FORWARDS_WITHOUT_SYNC} forwards with gradients without "
                "sync_float8_amax_and_scale_history(model): delayed scales do not change until it is called. "
                "Call it once a step, after the backward",
                RuntimeWarning,
            )

    def record_load(self) -> None:
        """Bring the host up to date after slots were loaded."""
        self.refresh_after_load()
        self.loads += 1
        if not isinstance(self.quant_scale, FakeTensor):
            self.loaded_scales = self.quant_scale.tolist()

    def refresh_after_load(self) -> None:
        """Bring the host's flags up to date after slots were written."""
        missing = self.quant_scale[self.calibrated_slots] <= 0
        self.has_unknown_static = missing.numel() > 0 and bool(missing.any())  # fake tensors have no values
        self.reset_amax_buffer()
        self.syncs_with_unknown_scales = 0
        self.refresh_known()


def is_calibrated(cast: CastConfig) -> bool:
    """Return whether the static scale of `cast` is measured, not given by the config."""
    return cast.scaling_type is ScalingType.STATIC and cast.static_quant_scale is None


def find_persistent_casts(config: Float8LinearConfig) -> dict[str, CastConfig | None]:
    """Return the delayed or static cast of each operand, or None, whichever matmuls run in high precision."""
    return {
        operand: next((cast for cast in casts.directions if cast.is_persistent), None)
        for operand, casts in zip(OPERANDS, replace(config, high_precision_matmuls=()).casts, strict=True)
    }


class LinearScaleSlots:
    """The slots of one linear, as its persistent scales."""

    def __init__(
        self, conversion_slots: ConversionScaleSlots, slots: tuple[int | None, int | None, int | None]
    ) -> None:
        self.conversion_slots, self.slots = conversion_slots, slots
        self.recorded_weight_amax: Tensor | None = None
        """float32 [2], like `PersistentScale.amax_buffer`, of a cast of the weight before the forward."""
        conversion_slots.linear_slots.append(self)
        self.renew_views()

    def renew_views(self) -> None:
        """Replace the views by new views of the slots."""
        self.recorded, self.unrecorded = (
            PersistentScales(*(self.conversion_slots.get_persistent_scale(slot, record=record) for slot in self.slots))
            for record in (True, False)
        )

    def move_and_get_scales(self, device: torch.device) -> PersistentScales:
        """Move all slots of the conversion to `device`. Return the scales for casts there that record no amaxes."""
        if device != self.conversion_slots.device:
            self.move_to(device)
        if self.conversion_slots.has_unknown_static and not self.conversion_slots.calibrating:
            raise RuntimeError(
                "this model has static scales that were never measured: run a few batches inside "
                "calibrate_float8_static_scales(model), load them, or give CastConfig.static_quant_scale"
            )
        return self.unrecorded

    def begin_forward_and_get_scales(self, device: torch.device, weight: Tensor | None) -> PersistentScales:
        """Begin a forward, and return the scales for its casts, which record amaxes; see [Note: who records].

        Counts the forward, and merges `recorded_weight_amax` into the conversion's slots, which move to `device`.

        Args:
            weight: the linear's, for [Note: a forgotten sync].
        Raises:
            NotImplementedError: linears of one conversion train on two devices. A backward on the first device would
                write its amax into the buffer that the move has replaced.
        """
        conversion_slots = self.conversion_slots
        if device != conversion_slots.device and conversion_slots.forwards.count and device.type != "meta":
            raise NotImplementedError(
                "the linears of one conversion keep their delayed or static scales on one device, and since the "
                f"last sync they trained on {conversion_slots.device} and {device}: convert the part of each device "
                "in a separate call of convert_to_float8_training, or move the model to one device before the step"
            )
        self.move_and_get_scales(device)
        if self.recorded.weight is not None and self.recorded_weight_amax is not None:
            update_amax_buffer(self.recorded.weight, self.recorded_weight_amax)
        if not torch.compiler.is_compiling():
            conversion_slots.count_forward(id(self), weight)
        return self.recorded

    def begin_weight_cast_and_get_scale(
        self, device: torch.device, recorded_amax: Tensor | None = None
    ) -> PersistentScale | None:
        """Begin a cast of the weight before the forward. Return its scale, or None if it is scaled dynamically.

        The cast records into `recorded_weight_amax`; see [Note: who records].

        Args:
            recorded_amax: `recorded_weight_amax` of an earlier cast of the same weight, which this cast updates.
        """
        scale = self.move_and_get_scales(device).weight
        if scale is None:
            return None
        if recorded_amax is None:
            with torch.inference_mode(False):  # a later forward may train
                recorded_amax = scale.quant_scale.new_full((2,), NO_AMAX)
        self.recorded_weight_amax = recorded_amax
        return scale._replace(amax_buffer=recorded_amax)

    def fits(self, config: Float8LinearConfig) -> bool:
        """Return whether the slots hold the persistent scales of `config`. Dynamic casts need none."""
        conversion_slots = self.conversion_slots
        if (conversion_slots.delayed_config, conversion_slots.power_of_2) != (
            config.delayed_scaling_config,
            config.round_scales_to_power_of_2,
        ):
            return False
        slot_casts = [None if slot is None else conversion_slots.casts[slot] for slot in self.slots]
        needed = find_persistent_casts(config).values()
        return all(cast in (None, slot_cast) for cast, slot_cast in zip(needed, slot_casts, strict=True))

    def list_named_slots(self, prefix: str = "") -> list[NamedSlot]:
        """Return the slots of this linear, named `<prefix><operand>`."""
        named = zip(OPERANDS, self.slots, strict=True)
        return [(f"{prefix}{operand}", self.conversion_slots, slot) for operand, slot in named if slot is not None]

    def describe_loaded_weight_scale(self) -> str:
        """Describe the last load for the ranks to compare."""
        slot = self.slots[OPERANDS.index("weight")]
        return (
            "no persistent scale" if slot is None else f"loaded quant_scale {self.conversion_slots.loaded_scales[slot]}"
        )

    def move_to(self, device: torch.device) -> None:
        device = add_device_index(device)
        if device.type != "meta" and device != self.conversion_slots.device:
            if torch.compiler.is_compiling():
                scales_on = self.conversion_slots.device
                raise RuntimeError(f"the persistent scales are on {scales_on}, input on {device}: move the model")
            self.conversion_slots.to(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return LinearScaleSlots, (self.conversion_slots, self.slots)  # a copy has views of the copied slots


NamedSlot = tuple[str, ConversionScaleSlots, int]
