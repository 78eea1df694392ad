"""The reference model of TRL's trainers, in the float8 of the model that trains.

DPO, GRPO, KTO and RLOO compare the model with a reference. Unless they are given one, they load it from disk, in high
precision, and the two differ by float8's rounding before the first update: DPO's first loss is not log(2), GRPO's KL is
not 0. Delayed and static scales of the model are the reference's, too: its forwards record no gradients, so that it
would never get scales of its own, and cast with others than the model.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import Trainer

from quaver.conversion.convert import convert_to_float8_training
from quaver.experts.base import Float8Grouped
from quaver.linear.module import Float8Linear
from quaver.linear.scale_state import LinearScales
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.names import plain_name

logger = logging.getLogger(__name__)


def convert_reference(model: nn.Module) -> None:
    """Convert the reference model of the Trainer that calls, if it has one in high precision, as `model` is converted.

    Layers that are converted alike share the model's delayed and static scales. Logs what it did.
    """
    trainer = _calling_trainer()
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, nn.Module):
        if getattr(getattr(trainer, "args", None), "precompute_ref_log_probs", False) and trainer.is_fsdp_enabled:
            logger.warning(
                "float8: under FSDP the reference's log-probabilities come from a model that TRL loads in high "
                "precision; pass ref_model=prepare_model_for_float8(...) for float8's"
            )
        return
    if _configs(reference):
        _share_scales(reference, model)
        return
    converted = _convert_like(getattr(reference, "module", reference), _configs(model))
    _share_scales(reference, model)
    logger.warning(
        "float8: %d layers of the reference model are in float8 like those of the model; "
        "Float8Callback(convert_reference=False) leaves it in high precision",
        converted,
    )


def _convert_like(reference: nn.Module, configs: dict[str, Float8LinearConfig]) -> int:
    """Convert the layers that have these names, without float8 all-gathers; returns how many there are."""
    names = {plain_name(name) for name, _ in reference.named_modules()}
    for config in set(configs.values()):
        named = {name for name, each in configs.items() if each == config} & names
        convert_to_float8_training(
            reference,
            config=_ungathered(config),
            module_filter_fn=lambda _, name, named=named: plain_name(name) in named,  # type: ignore[misc]
            include_subclasses=True,
        )
    return len(_configs(reference))


def _ungathered(config: Float8LinearConfig) -> Float8LinearConfig:
    return replace(config, enable_fsdp_float8_all_gather=False)


def _share_scales(reference: nn.Module, model: nn.Module) -> None:
    """Give the reference's linears the persistent scales of the model's linears of the same names and config."""
    trained = {plain_name(name): each for name, each in model.named_modules() if isinstance(each, Float8Linear)}
    for name, each in reference.named_modules():
        like = trained.get(plain_name(name))
        if not isinstance(each, Float8Linear) or each is like or like is None or like.scaling is None:
            continue
        if _ungathered(each.config) == _ungathered(like.config):
            each.scaling = LinearScales(like.scaling.state, like.scaling.slots)


def _configs(model: nn.Module) -> dict[str, Float8LinearConfig]:
    """The configs of the float8 modules of `model` by their names, without what wrappers add to them."""
    return {
        plain_name(name): module.config if isinstance(module, Float8Linear) else module.float8_config
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear | Float8Grouped)
    }


def _calling_trainer() -> Any:
    """The Trainer whose method is running, None outside of one. It hands itself to no callback."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None
