"""The persistent scales of a model: the state of delayed and static scaling, and the rule that updates it.

One `ScaleState` holds T slots for the linears of one conversion. A slot is one operand (input, weight, grad_output).

    quant_scale [T]      what casts multiply by; 0 while it is unknown
    amax_buffer [T, 2]   largest amax and most saturated elements since the last sync; -1 before the first cast
    history     [T, H]   the amaxes of the last H steps, newest last, 0 where there is none

Casts read quant_scale and update amax_buffer by a maximum, in the read that they make anyway. A maximum is idempotent,
so recomputation, microbatches and modules that run several times need no bookkeeping. No scale changes between two
syncs, so a recomputation has the bits of its forward. The sync, once a step after the backward, takes the maximum over
ranks, appends it to the history and computes the next scales (`DelayedScalingConfig` has the formula). A slot that no
rank cast in this step stays as it is.

[Note: cold start] While a slot's scale is unknown, each cast uses the scale of its own amax. The cast decides on the
device, so nothing is recompiled.

[Note: no buffers] Slots are not module buffers: state dicts are nn.Linear's, DDP broadcasts nothing, and FSDP manages
nothing. `float8_scaling_state(model)` saves and loads them under names of their own.

[Note: stale scales] Every change of a scale writes `quant_scale` in place or replaces it. All views share its version
counter, which compiled code increments too, so a cached cast is valid while its `PersistentScale` is the same
object with the same `quant_scale._version`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from quaver import scaling
from quaver.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from quaver.formats import FORMATS
from quaver.scaling import PersistentScale, PersistentScales

OPERANDS = ("input", "weight", "grad_output")

_NOT_CAST = -1.0
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_NOT_COPIED = ("views", "_persistent", "trained_modules", "_trained_by", "_stepped")
"""Attributes of a `ScaleState` that its copies start without."""


class ScaleState:
    """The persistent scales of the linears of one conversion; the top of the file describes its tensors.

    Attributes:
        quant_scale, amax_buffer, history: float32 [T], [T, 2], [T, H], on the device of the linears.
        last_step: float32 [T, 3], quant_scale and amax_buffer over all ranks as the last sync found them, for reports.
        is_initialized: bool [T] on the CPU, a copy of quant_scale > 0. Read only where ranks decide on the host.
        uncalibrated: whether a static scale has not been measured.
        calibrating: whether static scales are being measured.
        trained_modules: the model or modules of it; an optimizer with one of their parameters trains it.
    """

    @torch.inference_mode(False)
    def __init__(self, casts: Sequence[CastConfig], config: Float8LinearConfig, device: torch.device) -> None:
        """`casts`: one for each slot."""
        self.casts = tuple(casts)
        self.delayed_config = config.delayed_scaling_config
        self.power_of_2 = config.round_scales_to_power_of_2
        self.calibrated_slots = [
            slot
            for slot, cast in enumerate(casts)
            if cast.scaling_type is ScalingType.STATIC and cast.static_quant_scale is None
        ]
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        slots = len(casts)
        self.quant_scale = torch.tensor([cast.static_quant_scale or 0.0 for cast in casts], **options)
        self.amax_buffer = torch.empty(slots, 2, **options)
        self.history = torch.zeros(slots, self.delayed_config.history_len, **options)
        self.format_max = torch.tensor([FORMATS[cast.float8_dtype].max for cast in casts], **options)
        self.is_delayed = torch.tensor([cast.scaling_type is ScalingType.DELAYED for cast in casts], device=device)
        self.is_initialized = torch.zeros(slots, dtype=torch.bool, device="cpu")
        self.calibrating = False
        self.host_decides = False
        self.was_synced = False
        self.warned = False
        self.was_loaded()
        self.last_step = torch.cat([self.quant_scale.unsqueeze(1), self.amax_buffer], 1)
        self._start()

    def _start(self) -> None:
        self.views: list[LinearScales] = []
        self._persistent: dict[tuple[int, bool], PersistentScale] = {}
        self.trained_modules: WeakSet[nn.Module] = WeakSet()
        self._trained_by: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        """The optimizers that have stepped since the last sync."""
        if any(cast.scaling_type is ScalingType.DELAYED for cast in self.casts):
            _register_step_hook()
            _delayed.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def device(self) -> torch.device:
        return self.quant_scale.device

    def persistent_scale(self, slot: int | None, *, record: bool) -> PersistentScale | None:
        """The view of one slot. The same object each time: linears that share a slot share its casts by identity."""
        if slot is None:
            return None
        if (slot, record) not in self._persistent:
            buffer = self.amax_buffer[slot] if record else None
            self._persistent[slot, record] = PersistentScale(self.quant_scale[slot], buffer, self.is_initialized[slot])
        return self._persistent[slot, record]

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Move to another device; views follow."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "is_initialized":
                setattr(self, name, value.to(device))
        self._persistent.clear()
        for views in self.views:
            views.refresh()

    def sync(self, group: ProcessGroup | None) -> None:
        """Compute the next scales of the delayed slots: a fixed number of kernels, and one all-reduce with a group.

        Traceable without graph breaks: it reads no tensor on the host, except where `host_decides` in eager code.
        """
        config = self.delayed_config
        observed = all_reduce_amax(self.amax_buffer, group)
        amax = observed[:, 0]
        remembered = self.is_delayed & ~(amax < 0)  # NaN is remembered, too
        if config.nonfinite_amax == "skip":
            remembered &= amax.isfinite()
        shifted = torch.cat([self.history[:, 1:], amax.unsqueeze(1)], 1)
        self.history.copy_(torch.where(remembered.unsqueeze(1), shifted, self.history))
        largest = self.history.amax(1) if config.scale_fn_name == "max" else self.history[:, -1]
        usable = remembered & (largest > 0) & largest.isfinite()
        scale = next_scale(largest, self.format_max, config, self.power_of_2)
        self.last_step.copy_(torch.cat([self.quant_scale.unsqueeze(1), observed], 1))
        self.quant_scale.copy_(torch.where(usable, scale, self.quant_scale))
        self.reset_amax_buffer()
        # Waits for the device. With an outdated copy, ranks would exchange amaxes for a scale that is known.
        if self.host_decides and (torch.compiler.is_compiling() or not self.is_initialized.all()):
            self.refresh_is_initialized()
        self.was_synced = True

    def reset_amax_buffer(self) -> None:
        self.amax_buffer.fill_(_NOT_CAST)

    def refresh_is_initialized(self) -> None:
        self.is_initialized.copy_(self.quant_scale > 0)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Warn once when an optimizer of this model steps twice without a sync between.

        Without a sync nothing fails, but tensors that outgrow their scales saturate. A forward cannot count steps:
        compiled code runs no Python, and a step may have many microbatches.
        """
        if optimizer not in self._trained_by:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            parameters = (parameter for module in self.trained_modules for parameter in module.parameters())
            self._trained_by[optimizer] = any(id(parameter) in held for parameter in parameters)
        if self.warned or not self._trained_by[optimizer]:
            return
        if self.was_synced:
            self._stepped.clear()
            self.was_synced = False
        if optimizer in self._stepped:
            self.warned = True
            warnings.warn(
                "two optimizer steps without sync_float8_amax_and_scale_history(model) between them: delayed scales "
                "do not change until it is called. Call it once a step, after the backward",
                RuntimeWarning,
                stacklevel=2,
            )
        self._stepped.add(optimizer)

    def was_loaded(self) -> None:
        """Bring the host's flags up to date after slots were written."""
        missing = self.quant_scale[self.calibrated_slots] <= 0
        self.uncalibrated = missing.numel() > 0 and bool(missing.any())  # fake tensors have no value to ask for
        self.reset_amax_buffer()
        self.refresh_is_initialized()


class LinearScales:
    """The slots of one linear, as its persistent scales."""

    def __init__(self, state: ScaleState, slots: tuple[int | None, int | None, int | None]) -> None:
        self.state, self.slots = state, slots
        state.views.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Take new views of the state."""
        self.recorded, self.unrecorded = (
            PersistentScales(*(self.state.persistent_scale(slot, record=record) for slot in self.slots))
            for record in (True, False)
        )

    def scales(self, *, recording: bool, device: torch.device) -> PersistentScales:
        state = self.state
        if device != state.device:
            self.follow(device)
        if state.uncalibrated and not state.calibrating:
            raise RuntimeError(
                "this model has static scales that were never measured: run a few batches inside "
                "calibrate_float8_static_scales(model), load them, or give CastConfig.static_quant_scale"
            )
        return self.recorded if recording or state.calibrating else self.unrecorded

    def named_slots(self, prefix: str = "") -> list[NamedSlot]:
        """The slots of this linear as `<prefix><operand>`."""
        slots = zip(OPERANDS, self.slots, strict=True)
        return [(f"{prefix}{operand}", self.state, slot) for operand, slot in slots if slot is not None]

    def belongs_to(self, linear: nn.Module) -> None:
        self.state.trained_modules.add(linear)

    def host_decides(self) -> None:
        self.state.host_decides = True

    def follow(self, device: torch.device) -> None:
        if device.type != "meta" and device != self.state.device:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"the persistent scales are on {self.state.device} and the input is on {device}: move the model"
                )
            self.state.to(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return LinearScales, (self.state, self.slots)  # views of the copy's state, not copies of views


def next_scale(amax: Tensor, format_max: Tensor, config: DelayedScalingConfig, power_of_2: bool) -> Tensor:
    """The quant_scale for tensors whose expected amax is `amax`; float32 of its shape, valid where amax is above 0.

    TransformerEngine's formula: the largest float32 where the quotient overflows. It divides in float64, for the same
    bits on every device ([Note: one division, two formulas] in scaling.py).
    """
    scale = (format_max.double() / config.headroom / amax.double()).float() / 2.0**config.margin
    scale = scale.clamp(max=_LARGEST_FLOAT32)
    return scaling.round_down_to_power_of_2(scale) if power_of_2 else scale


def all_reduce_amax(amax_buffer: Tensor, group: ProcessGroup | None) -> Tensor:
    """The maximum over ranks: NaN where one rank has a NaN, -1 only where all have it."""
    if group is None:
        return amax_buffer
    # As integers, magnitudes order alike with NaNs on top. A NaN may have a sign, and -1 must lose against everything.
    bits = torch.where(amax_buffer < 0, -1, amax_buffer.view(torch.int32).bitwise_and(0x7FFFFFFF))
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return torch.where(bits < 0, _NOT_CAST, bits.view(torch.float32))


_delayed: WeakSet[ScaleState] = WeakSet()


@functools.cache
def _register_step_hook() -> None:
    register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or all(_has_no_learning_rate(group) for group in optimizer.param_groups):
        return
    for state in list(_delayed):
        state.after_optimizer_step(optimizer)


def _has_no_learning_rate(group: dict[str, Any]) -> bool:
    """Whether the step changes nothing; torch.distributed.checkpoint makes one to create an optimizer's state."""
    rate = group.get("lr")
    if isinstance(rate, Tensor) and not rate.is_cpu:
        return False  # the host does not wait for the device
    return rate is not None and float(rate) == 0


NamedSlot = tuple[str, ScaleState, int]


def entries_of(named_slots: Iterable[NamedSlot]) -> dict[str, Tensor]:
    """`<name>.quant_scale` () and `<name>.amax_history` [H] as views; nothing where the config gives the scale."""
    entries: dict[str, Tensor] = {}
    for name, state, slot in named_slots:
        is_delayed = state.casts[slot].scaling_type is ScalingType.DELAYED
        if is_delayed or slot in state.calibrated_slots:
            entries[f"{name}.quant_scale"] = state.quant_scale[slot]
        if is_delayed:
            entries[f"{name}.amax_history"] = state.history[slot]
    return entries


@torch.no_grad()
def load_slots(named_slots: Sequence[NamedSlot], given: Mapping[str, Any]) -> int:
    """Copy `given` into `entries_of(named_slots)`, and zeros (a cold start) into those that it lacks. Returns how many.

    A history of another length keeps its newest amaxes. A negative scale, which earlier versions wrote for a tensor
    that was to be scaled dynamically for one step, is unknown.

    Raises:
        ValueError: an entry that is not a tensor of the right number of dims; nothing is then loaded.
    """
    entries = entries_of(named_slots)
    for name, view in entries.items():
        dims = given[name].dim() if isinstance(given.get(name), Tensor) else "no tensor"
        if name in given and dims != view.dim():
            raise ValueError(f"{name}: expected a tensor of {view.dim()} dims, got {dims}")
    for name, view in entries.items():
        source = given.get(name, view.new_zeros(()))
        if view.dim() and source.dim() and len(source) != len(view):
            source = torch.cat([view.new_zeros(len(view)), source.to(view.device)])[-len(view) :]
        view.copy_(source.clamp(min=0))
    for state in {id(state): state for _, state, _ in named_slots}.values():
        state.was_loaded()
    return sum(name not in given for name in entries)
