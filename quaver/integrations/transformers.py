"""transformers' Trainer, also under TRL and PEFT: one call before the Trainer, and one callback.

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuaverConfig("rowwise"))
    trainer = Trainer(model, TrainingArguments(..., bf16=True), train_dataset=..., callbacks=[Float8Callback()])

`prepare_model_for_float8(model, "rowwise")` converts a loaded model. Convert before `Trainer(...)`, which collects the
model's parameters.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from quaver.conversion.check import assert_float8_training
from quaver.conversion.persistent_scales import (
    Float8ScalingState,
    float8_scaling_state,
    load_checkpoint_scales,
    sync_float8_amax_and_scale_history,
)
from quaver.conversion.report import conversion_report
from quaver.fsdp.weight_group import precompute_scales
from quaver.integrations.transformers_convert import prepare_model_for_float8
from quaver.integrations.transformers_reference import convert_reference, find_calling_trainer
from quaver.numerics.monitoring import Monitor
from quaver.numerics.record import RECORD_FILE_NAME as NUMERICS_FILE
from quaver.weights.cast_once import open_scope

__all__ = ["Float8Callback", "prepare_model_for_float8"]

if importlib.util.find_spec("transformers.core_model_loading"):  # 5.0 and newer
    from quaver.integrations.transformers_quantizer import QuaverConfig, install_quantizer  # registers "quaver"

    install_quantizer()
    __all__ += ["QuaverConfig"]

if importlib.util.find_spec("transformers.distributed.expert_parallel"):  # 5.21 and newer
    import quaver.integrations.transformers_experts  # noqa: F401 - registers "float8"

logger = logging.getLogger(__name__)


class Float8Callback(TrainerCallback, ExportableState):
    """Runs the float8 parts of a training loop at the events of transformers' Trainer.

    At the start of training it checks that the model trains in float8 (`assert_float8_training`) and logs the
    conversion. With gradient accumulation it quantizes each weight once per step (`cast_weights_once`). It updates
    delayed scales before each optimizer step, and the scales of FSDP2's float8 all-gather after it.

    Persistent scales are saved in the trainer_state.json of each checkpoint. They are loaded when a run resumes, and
    with the best checkpoint under `load_best_model_at_end`.

    A run that an exception ended leaves its monitor and its `cast_weights_once` open. `close()` closes them; so does
    the next run that has a module in common.

    Logs gain `float8_flops`, the share of the linears' FLOPs in float8. With persistent scales they also gain
    `float8_saturated`, the most elements that a cast clipped in the last step, and `float8_scale_fit`. This is the
    largest ratio of a scale to its ideal: above 1 it clips, and NaN means that a tensor held one. With a monitor they
    gain `float8_sqnr_min_db`, the lowest SQNR of a cast or a result in its last sample.

    Args:
        monitor: the number of steps between samples of `quaver.monitor`, which writes numerics.jsonl in the output
            folder; or the arguments of `quaver.monitor` by name; None for no monitor.
        convert_reference: convert a high-precision reference model of TRL's trainers like the model.
    Raises:
        TypeError: `monitor` is none of these, or has an argument that `quaver.monitor` does not take.
    """

    def __init__(self, *, monitor: int | Mapping[str, Any] | None = None, convert_reference: bool = True) -> None:
        self._convert_reference = convert_reference
        self._options = _parse_monitor(monitor)
        self._monitor: Monitor | None = None
        self._scope = ExitStack()
        self._scales: Float8ScalingState | None = None
        """The persistent scales of the last model."""

    def state(self) -> dict[str, Any]:
        """Return the callback's entry in trainer_state.json. JSON keeps float32 exactly."""
        scales = {} if self._scales is None else self._scales.state_dict()
        arguments = {"monitor": _select_json(self._options), "convert_reference": self._convert_reference}
        return {"args": arguments, _SCALES_KEY: {k: v.tolist() for k, v in scales.items()}}

    def close(self) -> None:
        """Close the monitor and the scope in which weights are cast once, which an exception may have left open."""
        with suppress(RuntimeError):  # the scope raises if weights changed, which is fine after a failed run
            self._scope.close()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        _running_callbacks.discard(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        model, optimizer = trainer_state["model"], trainer_state["optimizer"]
        _close_interrupted(model)
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        assert_float8_training(model, getattr(optimizer, "optimizer", optimizer), allow_frozen=frozen)
        if state.is_world_process_zero:
            logger.info("float8: %s", conversion_report(model).summary())
        if self._convert_reference:
            convert_reference(find_calling_trainer(), model)
        if self._options is not None:
            options = {"sink": Path(args.output_dir) / NUMERICS_FILE, **self._options}
            self._monitor = Monitor(model, completed_steps=state.global_step, steps_by_hand=True, **options)
        self._scales = float8_scaling_state(model)
        if state.global_step:
            self._load_scales(state.stateful_callbacks, "the checkpoint")
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # a checkpoint may lack this callback
        self._modules = WeakSet(model.modules())
        _running_callbacks.add(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        self._scope.close()
        if args.gradient_accumulation_steps > 1:
            opened_by = "a Trainer's Float8Callback, whose close() leaves it"
            self._scope.enter_context(open_scope(trainer_state["model"], opened_by=opened_by))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        self._scope.close()
        if self._scales:
            sync_float8_amax_and_scale_history(trainer_state["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        precompute_scales(trainer_state["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        if self._monitor is not None:  # not on_optimizer_step: a gradient scaler may skip the optimizer's step
            self._monitor.step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **trainer_state: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        metrics = {"float8_flops": conversion_report(trainer_state["model"]).float8_flops_fraction}
        if self._scales:
            tensors = [tensor for tensor in self._scales.report() if not tensor.amax < 0]  # also a NaN
            has_nan = any(math.isnan(tensor.amax) for tensor in tensors)
            ratios = [math.nan] if has_nan else [tensor.used_over_ideal for tensor in tensors]
            metrics["float8_saturated"] = max((tensor.saturated for tensor in tensors), default=0)
            metrics["float8_scale_fit"] = max(ratios, default=1.0)
        if self._monitor is not None and self._monitor.samples:
            casts = [value for value in self._monitor.samples[-1]["sqnr_db"] if value is not None]
            if casts:  # zeros and non-finite tensors have no SQNR
                metrics["float8_sqnr_min_db"] = min(casts)
        logs.update(metrics)
        entry = state.log_history[-1] if state.log_history else {}
        if "loss" in entry and entry.get("step") == state.global_step:
            entry.update(metrics)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        self._scope.close()  # a callback may stop training within a step; the Trainer then loads the best weights

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer_state: Any) -> None:
        self.close()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint) / TRAINER_STATE_NAME
            self._load_scales(json.loads(path.read_text(encoding="utf-8"))["stateful_callbacks"], str(path))

    def _load_scales(self, callbacks: dict[str, Any], source: str) -> None:
        saved = callbacks.get(type(self).__name__, {})
        last = saved[-1] if isinstance(saved, list) else saved
        entries = last.get(_SCALES_KEY, {})
        scales = {name: torch.tensor(entry, dtype=torch.float32, device="cpu") for name, entry in entries.items()}
        if self._scales is not None:
            load_checkpoint_scales(self._scales, scales, source)


_SCALES_KEY = "scales"
"""The key of the persistent scales in the callback's state."""

_running_callbacks: WeakSet[Float8Callback] = WeakSet()
"""The callbacks whose run has begun and not ended."""


def _parse_monitor(monitor: object) -> Mapping[str, Any] | None:
    """Return the arguments of a monitor, or None. Raises TypeError if the callback cannot pass them."""
    options: object = {"every": monitor} if type(monitor) is int else monitor
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise TypeError(f"monitor: expected a number of steps, a mapping of arguments or None, got {monitor!r}")
    try:
        inspect.signature(Monitor).bind(None, completed_steps=0, steps_by_hand=True, **options)
    except TypeError as error:
        raise TypeError(f"monitor: {error}") from error
    return options


def _close_interrupted(model: nn.Module) -> None:
    """Close earlier runs on modules of `model`: the Trainer does not tell its callbacks about an exception."""
    modules = set(model.modules())
    for callback in [*_running_callbacks]:
        if not modules.isdisjoint(callback._modules):
            callback.close()


def _select_json(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the monitor's arguments that JSON can hold; an object as `sink` is left out."""
    if options is None:
        return None
    values = {key: value for key, value in options.items() if isinstance(value, bool | int | float | str | Path | None)}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
