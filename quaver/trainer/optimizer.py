"""AdamW with its two parameter groups, and the learning rate of each step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quaver.trainer.config import LRScheduler, Optimizer

REMAINING: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""What a decay leaves of the rate, above its floor, when this share (0 to 1) of its steps is done.

sqrt is the 1-sqrt cooldown of Hägele et al. 2024, https://arxiv.org/abs/2405.18392."""


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over `model`; weight decay applies to matrices, not to the vectors of norms and biases.

    The embedding is decayed as the other matrices are, as is usual for Llama; a tied one is in the group once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    kernels: dict[str, Any] = {"fused": config.implementation in ("auto", "fused")}
    if not kernels["fused"]:  # torch refuses both
        kernels["foreach"] = config.implementation == "foreach"
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **kernels)


def learning_rate(step: int, steps: int, config: Optimizer, schedule: LRScheduler) -> float:
    """Return the rate of `step` (1 to `steps`): linear up to lr at `warmup_steps`, then as `schedule` says."""
    if step <= schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    stable = schedule.schedule == "wsd"
    decay_begin = steps - schedule.decay_steps(steps) if stable else schedule.warmup_steps
    if schedule.schedule == "constant" or step <= decay_begin:
        return config.lr
    progress = (step - decay_begin) / max(1, steps - decay_begin)
    remaining = REMAINING[schedule.decay_type if stable else schedule.schedule](progress)
    return config.lr * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
