"""Turns the [float8] section into a conversion of the model."""

from dataclasses import replace

import torch
from torch import nn

from quaver import (
    FilterDecision,
    Float8LinearConfig,
    auto_filter_for_recipe,
    conversion_report,
    convert_to_float8_training,
)
from quaver.convert import ConversionReport
from quaver.trainer.config import Float8


def convert_model(model: nn.Module, config: Float8, *, tokens: int, device: torch.device) -> ConversionReport:
    """Convert the linears of `model` in place as `config` says, and return the report.

    Args:
        tokens: rows of the linears' inputs in one forward, and
        device: where it runs: what the automatic filter estimates for (on a CPU, what an H100 would gain).

    Raises:
        ValueError: if an entry of filter_fqns names no linear, or nothing is left to convert.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for skipped in config.filter_fqns:
        if not any(skipped in name for name in names):
            raise ValueError(
                f"float8.filter_fqns entry {skipped!r} is part of no linear's name; the linears are {', '.join(names)}"
            )
    automatic = None
    if config.auto_filter:
        target = device if device.type == "cuda" else None
        automatic = auto_filter_for_recipe(config.recipe_name, tokens=tokens, device=target)

    def decide(module: nn.Module, fqn: str) -> FilterDecision | bool:
        for skipped in config.filter_fqns:
            if skipped in fqn:
                return FilterDecision(False, f"float8.filter_fqns has {skipped!r}")
        return automatic(module, fqn) if automatic else True

    linear_config = replace(
        Float8LinearConfig.from_recipe_name(config.recipe_name),
        emulate=config.emulate,
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        delayed_scaling_config=config.delayed_scaling_config,
        enable_amax_init=config.enable_amax_init,
        enable_pre_and_post_forward=config.enable_pre_and_post_forward,
    )
    convert_to_float8_training(model, config=linear_config, module_filter_fn=decide)
    return conversion_report(model)
