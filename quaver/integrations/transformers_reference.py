"""Converts the reference model of TRL's trainers like the model that trains.

DPO, GRPO, KTO and RLOO compare the model with a reference. By default they load it from disk in high precision. The two
models then differ by float8's rounding before the first update: DPO's first loss is not log(2), GRPO's KL is not 0. The
reference shares the model's delayed and static scales. Its forwards record no gradients, so it would never update
separate scales, and its casts would differ from the model's.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import nn
from transformers import Trainer

from quaver.conversion.convert import convert_to_float8_training
from quaver.linear.float8_module import Float8Module
from quaver.linear.module import Float8Linear
from quaver.linear.scale_state import LinearScaleSlots
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.module_names import strip_wrappers

logger = logging.getLogger(__name__)


def convert_reference(trainer: Any, model: nn.Module) -> None:
    """Convert the reference model of `trainer`, if it is in high precision, like `model`; logs the conversion.

    Layers with the same config share the model's delayed and static scales.
    """
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, nn.Module):
        if getattr(getattr(trainer, "args", None), "precompute_ref_log_probs", False) and trainer.is_fsdp_enabled:
            logger.warning(
                "float8: under FSDP the reference's log-probabilities come from a model that TRL loads in high "
                "precision; pass ref_model=prepare_model_for_float8(...) for float8's"
            )
        return
    if _get_configs(reference):
        _share_scales(reference, model)
        return
    count = _convert_with_configs(getattr(reference, "module", reference), _get_configs(model))
    _share_scales(reference, model)
    logger.warning(
        "float8: %d layers of the reference model are in float8 like those of the model; "
        "Float8Callback(convert_reference=False) leaves it in high precision",
        count,
    )


def _convert_with_configs(reference: nn.Module, configs: dict[str, Float8LinearConfig]) -> int:
    """Convert the layers with these names, without float8 all-gathers. Returns the number of float8 layers."""
    for config in set(configs.values()):

        def decide(_: nn.Module, name: str, config: Float8LinearConfig = config) -> bool:
            return configs.get(strip_wrappers(name)) == config

        config = _remove_all_gather(config)
        convert_to_float8_training(reference, config=config, module_filter_fn=decide, include_subclasses=True)
    return len(_get_configs(reference))


def _remove_all_gather(config: Float8LinearConfig) -> Float8LinearConfig:
    return replace(config, enable_fsdp_float8_all_gather=False)


def _share_scales(reference: nn.Module, model: nn.Module) -> None:
    """Give the reference's linears the persistent scales of the model's linears with the same name and config."""
    modules = model.named_modules()
    trained = {strip_wrappers(name): module for name, module in modules if isinstance(module, Float8Linear)}
    for name, linear in reference.named_modules():
        source = trained.get(strip_wrappers(name))
        if not isinstance(linear, Float8Linear) or linear is source or source is None or source.scale_slots is None:
            continue
        if _remove_all_gather(linear.float8_config) == _remove_all_gather(source.float8_config):
            linear.scale_slots = LinearScaleSlots(source.scale_slots.conversion_slots, source.scale_slots.slots)


def _get_configs(model: nn.Module) -> dict[str, Float8LinearConfig]:
    return {
        strip_wrappers(name): module.float8_config
        for name, module in model.named_modules()
        if isinstance(module, Float8Module)
    }


def find_calling_trainer() -> Trainer | None:
    """Return the Trainer whose method is running, or None.

    A Trainer calls its callbacks without itself, and is made after them (`TrainerCallback`, transformers 5.23). So this
    searches the stack for a method of a Trainer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Trainer):
            return caller
        frame = frame.f_back
    return None
