"""Measures how far a trainer's log probabilities are from its rollout's, for the tokens that the rollout sampled.

    monitor.record_mismatch(compute_mismatch(logprobs_train, logprobs_rollout, mask))  # alarms above `MISMATCH_BOUNDS`

Each figure is computed from d = log p_train - log p_rollout over the tokens of the mask.

    k1                       mean(-d), an unbiased estimate of KL(rollout || train) that may be negative
    k3                       mean(exp(d) - 1 - d), unbiased, never negative (http://joschu.net/blog/kl-approx.html)
    token_mult_prob_error    mean(exp(|d|)), NeMo-RL's name and measure; 1 where both agree
    largest                  max(|d|)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MISMATCH_BOUNDS = (1.03, 1.05)
"""NeMo-RL's bounds of `token_mult_prob_error`: a run is healthy below the first and unhealthy above the second."""


@dataclass(frozen=True)
class Mismatch:
    """The figures of `compute_mismatch`, of d = log p_train - log p_rollout at each token."""

    k1: float
    """mean(-d)"""
    k3: float
    """mean(exp(d) - 1 - d)"""
    token_mult_prob_error: float
    """mean(exp(|d|))"""
    largest: float
    """max(|d|)"""
    tokens: int
    """How many tokens the mask selects."""


@torch.no_grad()
def compute_mismatch(logprobs_train: Tensor, logprobs_rollout: Tensor, mask: Tensor | None = None) -> Mismatch:
    """Compare the log probabilities of sampled tokens; sums are in float64.

    Args:
        logprobs_train, logprobs_rollout: floating point, of the same tokens, with the same shape and device.
        mask: 0 or 1 (or bool) for each token, with the same shape: which tokens count. None for all.
    Raises:
        ValueError: shapes differ, no token counts, or a token that counts has no finite log probability.
    """
    if logprobs_train.shape != logprobs_rollout.shape:
        shapes = f"{list(logprobs_train.shape)} and {list(logprobs_rollout.shape)}"
        raise ValueError(f"expected log probabilities of the same tokens, of one shape, got {shapes}")
    if mask is None:
        mask = torch.ones_like(logprobs_train, dtype=torch.bool)
    elif mask.shape != logprobs_train.shape:
        raise ValueError(f"mask: expected {list(logprobs_train.shape)} as log probabilities, got {list(mask.shape)}")
    elif not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask: expected 0 or 1 for each token, got other values")
    is_counted = mask.bool()
    train, rollout = (logprobs[is_counted].double() for logprobs in (logprobs_train, logprobs_rollout))
    if not train.numel():
        raise ValueError(f"mask: expected tokens that count, got none of {mask.numel()}")
    for name, values in (("train", train), ("rollout", rollout)):
        nonfinite = int((~values.isfinite()).sum())
        if nonfinite:
            raise ValueError(f"logprobs_{name}: expected finite values, got {nonfinite} of {len(values)} that are not")
    d = train - rollout
    figures = torch.stack([(-d).mean(), (d.expm1() - d).mean(), d.abs().exp().mean(), d.abs().max()])
    k1, k3, error, largest = figures.tolist()
    return Mismatch(k1, k3, error, largest, len(d))
