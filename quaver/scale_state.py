"""Kept scales: the state of delayed and static scaling for a whole model, and the rule that brings scales forward.

    quant_scale [T]      what casts multiply with; 0 where none is known, negative while it does not fit its tensor
    observed    [T, 2]   since the last sync: the largest amax (-1 where no cast ran), the most elements that saturated
    history     [T, H]   the amaxes of the last H steps, newest last, 0 where there is none

One row a tensor, T tensors: the input, weight and grad_output of each linear, as far as their scales are kept. All of
it lies in one `ScaleState`; linears hold views of a row (`quaver.kernels.cast.PersistentScale`), and know nothing else.

A step. Casts read quant_scale, and take the maximum of `observed` and what they see, in the one pass that they make
anyway. The maximum is idempotent: recomputed activations, microbatches and modules that run several times need no care,
and since no scale changes before the sync, a recomputation is bitwise what it repeats. After the backward

    sync_float8_amax_and_scale_history(model)

takes the maximum over ranks (one all-reduce), appends it to the history and computes the scales of the next step
(`DelayedScalingConfig` has the formula). A tensor that no rank cast in this step keeps its row as it is.

[Note: cold start] A row whose scale is not known is scaled dynamically, cast by cast, until a sync has seen it. So is
one whose scale left its `dynamic_window`, in the next step. The cast decides on the device: nothing is compiled again.

[Note: what is not in a module] Rows are no buffers: a module's state_dict is nn.Linear's, DDP broadcasts nothing, and
FSDP manages nothing. `float8_scaling_state(model)` saves and loads them under names of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from quaver import scaling
from quaver.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from quaver.formats import FORMATS
from quaver.scaling import PersistentScale, PersistentScales
from quaver.unsynced import watch_optimizers

logger = logging.getLogger(__name__)

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_NOT_SEEN = -1.0
_ROUNDING = 2.0**-20
"""How far a ratio of scales may be off by rounding, and more."""


class ScaleState:
    """The kept scales of the linears of one conversion; see the top of the file for what the tensors hold.

    Attributes:
        quant_scale, observed, history: float32 [T], [T, 2], [T, H], on the device of the linears.
        known: bool [T], on the CPU: what the host has last seen of quant_scale > 0; only kept where ranks decide by it.
        synced_scale, synced_observed: copies of quant_scale and observed as the last sync found them, for reports.
        uncalibrated: whether a static scale is missing.
        calibrating: whether static scales are being measured.
        steps_since_sync: optimizer steps, counted by unsynced.py.
    """

    def __init__(self, casts: Sequence[CastConfig], config: Float8LinearConfig, device: torch.device) -> None:
        """`casts`: one for each row."""
        rows = len(casts)
        self.delayed_config = config.delayed_scaling_config
        self.power_of_2 = config.round_scales_to_power_of_2
        history_len = self.delayed_config.history_len
        given = [cast.static_quant_scale or 0.0 for cast in casts]
        self.quant_scale = torch.tensor(given, dtype=torch.float32, device=device)
        self.observed = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self.history = torch.zeros(rows, history_len, dtype=torch.float32, device=device)
        self.descriptions = [str(cast) for cast in casts]
        self.delayed_rows = [cast.scaling_type is ScalingType.DELAYED for cast in casts]
        self.is_delayed = torch.tensor(self.delayed_rows, device=device)
        largest = [FORMATS[cast.float8_dtype].max for cast in casts]
        self.format_max = torch.tensor(largest, dtype=torch.float32, device=device)
        self.not_seen = torch.tensor([_NOT_SEEN, 0.0], dtype=torch.float32, device=device)
        self.known = torch.zeros(rows, dtype=torch.bool, device="cpu")
        self.calibrated_rows = [
            row
            for row, cast in enumerate(casts)
            if cast.scaling_type is ScalingType.STATIC and cast.static_quant_scale is None
        ]
        self.uncalibrated = bool(self.calibrated_rows)
        self.calibrating = False
        self.host_decides = False
        self.announced = False
        self.steps_since_sync = 0
        self.warned = False
        self.forget_observed()
        self.synced_scale, self.synced_observed = self.quant_scale.clone(), self.observed.clone()
        self._views_of: list[LinearScales] = []
        self._kept: dict[tuple[int, bool], PersistentScale] = {}
        self.trained_modules: WeakSet[nn.Module] = WeakSet()
        self.look_from_host()
        watch_optimizers(self)

    @property
    def device(self) -> torch.device:
        return self.quant_scale.device

    # ---- views ---------------------------------------------------------------------------------------------------

    def scaling_of(self, rows: tuple[int | None, int | None, int | None]) -> LinearScales:
        """The views of a linear whose operands have these rows."""
        views = LinearScales(self, rows)
        self._views_of.append(views)
        return views

    def kept(self, row: int | None, *, record: bool) -> PersistentScale | None:
        """The view of one row: the same object each time, by which linears that share it know that they do."""
        if row is None:
            return None
        known = self._kept.get((row, record))
        if known is None:
            known = PersistentScale(self.quant_scale[row], self.observed[row] if record else None, self.known[row])
            self._kept[row, record] = known
        return known

    def to(self, device: torch.device) -> None:
        """Move to another device; views follow."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "known":
                setattr(self, name, value.to(device))
        self._kept.clear()
        for views in self._views_of:
            views.refresh()

    def __getstate__(self) -> dict[str, Any]:
        made_again: dict[str, Any] = {"_views_of": [], "_kept": {}, "trained_modules": ()}
        return {**self.__dict__, **made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.trained_modules = WeakSet()
        watch_optimizers(self)

    # ---- the sync ------------------------------------------------------------------------------------------------

    def sync(self, group: ProcessGroup | None) -> None:
        """Bring the scales of delayed rows forward: a fixed number of kernels, and one collective with a group."""
        config = self.delayed_config
        observed = self.observed if group is None else largest_observed(self.observed, group)
        amax = observed[:, 0]
        finite = amax.isfinite()
        remembered = self.is_delayed & ~(amax < 0)  # a NaN was seen, too
        if config.nonfinite_amax == "skip":
            remembered &= finite
        shifted = torch.cat([self.history[:, 1:], amax.unsqueeze(1)], 1)
        self.history.copy_(torch.where(remembered.unsqueeze(1), shifted, self.history))
        largest = self.history.amax(1) if config.scale_fn_name == "max" else self.history[:, -1]
        usable = remembered & (largest > 0) & largest.isfinite()
        scale = next_scale(largest, self.format_max, config, self.power_of_2)
        scale = torch.where(usable, scale, self.quant_scale.abs())
        if config.dynamic_window is not None:
            low, high = config.dynamic_window
            ratio = self.quant_scale.abs() * amax / self.format_max  # of the kept scale, used in this step or not
            left = (ratio < low * (1 - _ROUNDING)) | (ratio > high * (1 + _ROUNDING))
            scale = torch.where(left & usable & finite & (amax > 0) & (self.quant_scale != 0), -scale, scale)
        self._announce()
        self.synced_observed.copy_(observed)
        self.synced_scale.copy_(self.quant_scale)
        self.quant_scale.copy_(scale)
        self.forget_observed()
        # A device that is waited for; but with a late answer ranks would scale a tensor otherwise than one rank does.
        if self.host_decides and (config.dynamic_window is not None or not self.known.all()):
            self.look_from_host()
        self.steps_since_sync = 0

    def forget_observed(self) -> None:
        self.observed.copy_(self.not_seen)

    def look_from_host(self) -> None:
        self.known.copy_(self.quant_scale > 0)

    def _announce(self) -> None:
        """Say once how many tensors started without a history."""
        if not self.announced:
            self.announced = True
            cold = int((self.is_delayed & (self.quant_scale == 0)).sum())
            if cold:
                total = sum(self.delayed_rows)
                logger.info("%d of %d delayed scales had no history: scaled dynamically until now", cold, total)

    # ---- loading -------------------------------------------------------------------------------------------------

    def is_learned(self, row: int) -> bool:
        """Whether the scale of a row comes from what was seen, and not from the config."""
        return self.delayed_rows[row] or row in self.calibrated_rows

    def forget(self, row: int) -> None:
        """Make one learned row as it was before its first step."""
        self.quant_scale[row] = 0
        self.history[row] = 0

    def was_loaded(self) -> None:
        """To be called after rows were written from outside."""
        self.uncalibrated = bool((self.quant_scale[self.calibrated_rows] <= 0).any())
        self.announced = False
        self.forget_observed()
        self.look_from_host()


def next_scale(amax: Tensor, format_max: Tensor, config: DelayedScalingConfig, power_of_2: bool) -> Tensor:
    """The quant_scale for tensors of which `amax` is expected; float32 of amax's shape, for amaxes that are above 0.

    TransformerEngine's formula: where the quotient overflows, the largest float32. It is divided in float64, for the
    same bits on every device ([Note: one division, two formulas] in scaling.py).
    """
    scale = (format_max.double() / config.headroom / amax.double()).float() / 2.0**config.margin
    scale = scale.clamp(max=_LARGEST_FLOAT32)
    return scaling.round_down_to_power_of_2(scale) if power_of_2 else scale


def largest_observed(observed: Tensor, group: ProcessGroup) -> Tensor:
    """The maximum over ranks, NaN where one has a NaN; -1 only where all have it."""
    # As integers magnitudes order alike, with NaNs on top; a NaN may have a sign, and -1 has to lose to all.
    bits = torch.where(observed < 0, -1, observed.view(torch.int32).bitwise_and(0x7FFFFFFF))
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return torch.where(bits < 0, _NOT_SEEN, bits.view(torch.float32))


class LinearScales:
    """The rows of one linear; implements `quaver.linear_surroundings.LinearScaling`."""

    def __init__(self, state: ScaleState, rows: tuple[int | None, int | None, int | None]) -> None:
        self.state, self.rows = state, rows
        self.refresh()

    def refresh(self) -> None:
        """Take new views of the state."""
        self.recorded = PersistentScales(*(self.state.kept(row, record=True) for row in self.rows))
        self.unrecorded = PersistentScales(*(self.state.kept(row, record=False) for row in self.rows))

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

    def belongs_to(self, linear: nn.Module) -> None:
        self.state.trained_modules.add(linear)

    def host_decides(self) -> None:
        self.state.host_decides = True

    def follow(self, device: torch.device) -> None:
        if device.type != "meta" and device != self.state.device:
            if torch.compiler.is_compiling():
                raise RuntimeError(f"the kept scales are on {self.state.device}, the input on {device}: move the model")
            self.state.to(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScaleState.scaling_of, (self.state, self.rows)  # views of the copy's state, not copies of views
