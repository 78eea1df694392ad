"""AdamW with its two parameter groups, and the learning rate of each step."""

import math

import torch
from torch import nn

from quaver.trainer.config import LRScheduler, Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over `model`; weight decay applies to matrices, not to the vectors of norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: Optimizer, schedule: LRScheduler) -> float:
    """Return the rate of `step` (1 to `steps`): linear up to lr at `warmup_steps`, then a cosine down."""
    if step <= schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
