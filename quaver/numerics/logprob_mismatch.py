"""Measures how far a trainer's log probabilities are from its rollout's, for the tokens that the rollout sampled.

    monitor.record_mismatch(compute_mismatch(logprobs_train, logprobs_rollout, mask))  # alarms above `MISMATCH_BOUNDS`

Each figure is computed from d = log p_train - log p_rollout over the tokens of the mask.

    k1                       mean(-d), an unbiased estimate of KL(rollout || train) that may be negative
    k3                       mean(exp(d) - 1 - d), unbiased, never negative (http://joschu.net/blog/kl-approx.html)
    token_mult_prob_error    mean(exp(|d|)), NeMo-RL's name and measure; 1 where both agree
    largest                  max(|d|)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quaver.recipes.sqnr import compute_sqnr_db
from quaver.runtime.names import strip_wrappers

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
    counts = mask.bool()
    train, rollout = (logprobs[counts].double() for logprobs in (logprobs_train, logprobs_rollout))
    if not train.numel():
        raise ValueError(f"mask: expected tokens that count, got none of {mask.numel()}")
    for name, values in (("train", train), ("rollout", rollout)):
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(f"logprobs_{name}: expected finite values, got {bad} of {len(values)} that are not")
    d = train - rollout
    figures = torch.stack([(-d).mean(), (d.expm1() - d).mean(), d.abs().exp().mean(), d.abs().max()])
    k1, k3, error, largest = figures.tolist()
    return Mismatch(k1, k3, error, largest, len(d))


@dataclass(frozen=True)
class Difference:
    """A layer whose output differs between two models."""

    layer: str
    sqnr_db: float
    """The SQNR of the second model's output, with the first model's as the reference."""
    is_origin: bool
    """Whether its inputs are bit-identical, so that the layer itself causes the difference."""


@torch.no_grad()
def find_first_differences(model: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> list[Difference]:
    """Call both models with the same arguments, and list the layers whose outputs differ, in the order of the forward.

    Layers are the modules without children. The inputs and outputs of all layers of `model` are held in memory, so use
    a short prompt. Compare in eval mode; the mode of the models is not changed. If a layer runs several times, its last
    run counts.

    Raises:
        ValueError: no layer of the two models has the same name.
    """
    recorded: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    differences: dict[str, Difference] = {}

    def record(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        recorded[name] = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in outputs]

    def compare(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        differences.pop(name, None)
        if name not in recorded or _are_equal(recorded[name][1], outputs):
            return
        pairs = [pair for pair in zip(recorded[name][1], outputs, strict=False) if pair[0].shape == pair[1].shape]
        worst = min((compute_sqnr_db(*pair) for pair in pairs if pair[0].is_floating_point()), default=float("nan"))
        differences[name] = Difference(name, worst, _are_equal(recorded[name][0], inputs))

    _run(model, record, args, kwargs)
    common = _find_layers(model).keys() & _find_layers(other).keys()
    if not common:
        raise ValueError("expected two models with layers of the same names, got none in common")
    _run(other, compare, args, kwargs)
    return list(differences.values())


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    modules = model.named_modules()
    return {strip_wrappers(f"{name}.")[:-1]: module for name, module in modules if not list(module.children())}


def _run(
    model: nn.Module,
    observe: Callable[[str, list[Tensor], list[Tensor]], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call `model`, and `observe` with the name, inputs and outputs of each layer."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _, inputs, named, output: observe(name, _list_tensors((inputs, named)), _list_tensors(output))

    layers = _find_layers(model)
    handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))
