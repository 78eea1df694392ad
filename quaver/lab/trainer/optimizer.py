"""The optimizer with its parameter groups, the learning rate of each step, and gradient clipping over all ranks."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.settings import LRScheduler, Optimizer
from quaver.optim import FLOAT32_MOMENTS, CombinedOptimizer, Float8AdamW, Float8Muon, find_embedding_weights

DECAY_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Functions from the share (0 to 1) of the decay's steps that are done to what remains of the learning rate above its
floor, by decay_type.

sqrt is the 1-sqrt cooldown of Hägele et al. 2024, https://arxiv.org/abs/2405.18392."""


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of `model`; weight decay applies to matrices, embeddings included, not to norms and biases.

    With Muon it is a `CombinedOptimizer`: Muon for matrices of blocks; AdamW for embeddings, the head, norms, biases
    and experts, whose weights are 3-D.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not config.is_muon:
        return _make_adamw(parameters, model, config)
    block_parameters = set(model.get_submodule("model.layers").parameters())
    muon_parameters = [p for p in parameters if p.dim() == 2 and p in block_parameters]
    adamw_parameters = [p for p in parameters if p.dim() != 2 or p not in block_parameters]
    muon_class: Any = Float8Muon if config.has_float8_states else torch.optim.Muon
    options = {"weight_decay": config.weight_decay, "momentum": config.momentum, "adjust_lr_fn": "match_rms_adamw"}
    muon = muon_class(muon_parameters, lr=config.lr, **options)
    if isinstance(muon, Float8Muon):
        muon.name_parameters(model)
    return CombinedOptimizer(muon, _make_adamw(adamw_parameters, model, config))


def _make_adamw(parameters: list[nn.Parameter], model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.has_float8_states:
        embeddings = find_embedding_weights(model)
        embedding_weights = [p for p in groups[0]["params"] if p in embeddings]
        groups[0]["params"] = [p for p in groups[0]["params"] if p not in embeddings]
        groups.append({"params": embedding_weights, "weight_decay": config.weight_decay, **FLOAT32_MOMENTS})
    # DCP loads a group without parameters without its options, unless it is the last (torch 2.13).
    groups = [group for group in groups if group["params"]]
    if config.has_float8_states:
        adamw = Float8AdamW(groups, lr=config.lr, betas=betas, eps=config.eps)
        adamw.name_parameters(model)
        return adamw
    kernels: dict[str, Any] = {"fused": config.implementation in ("auto", "fused")}
    if not kernels["fused"]:  # torch refuses both
        kernels["foreach"] = config.implementation == "foreach"
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **kernels)


def compute_learning_rate(step: int, steps: int, config: Optimizer, schedule: LRScheduler) -> float:
    """Return the rate of `step` (1 to `steps`): linear up to lr at `warmup_steps`, then as `schedule` says."""
    if step <= schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    is_wsd = schedule.schedule == "wsd"
    decay_begin = steps - schedule.count_decay_steps(steps) if is_wsd else schedule.warmup_steps
    if schedule.schedule == "constant" or step <= decay_begin:
        return config.lr
    progress = (step - decay_begin) / max(1, steps - decay_begin)
    remaining = DECAY_FUNCTIONS[schedule.decay_type if is_wsd else schedule.schedule](progress)
    return config.lr * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining)


def sum_partial_gradients(model: nn.Module) -> None:
    """Give each gradient its parameter's placements: gradients of norms are partial sums where FSDP2 reduces none."""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def compute_squared_norm_share(model: nn.Module) -> Tensor:
    """Return this rank's share of the squared norm of all gradients, a float32 scalar. The shares of all ranks add up.

    A gradient that n ranks hold counts 1/n on each. Every parameter must be on the mesh of all ranks.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups[_count_copies(parameter.grad)] += list_plain_tensors(parameter.grad)
    shares = []
    for copies, grads in groups.items():
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)  # one in bfloat16 would be rounded to 8 bits
        shares.append(torch.linalg.vector_norm(torch.stack(norms)).square() / copies)
    return torch.stack(shares).sum()


def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, of norm `norm` over all ranks, to at most `max_norm`, as `clip_grad_norm_` does."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([plain for grad in grads for plain in list_plain_tensors(grad)], factor)


def _count_copies(grad: Tensor) -> int:
    """Return the number of ranks that hold the same part of `grad`."""
    if not isinstance(grad, DTensor):
        return 1
    return math.prod(grad.device_mesh.size(axis) for axis, place in enumerate(grad.placements) if place.is_replicate())
