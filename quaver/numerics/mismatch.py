"""How far the log probabilities of a trainer are from those of the rollout that sampled its tokens.

    found = mismatch(logprobs_train, logprobs_rollout, mask)
    monitor.mismatch(found)                  # a rule of the monitor alarms above `HEALTHY`

With d = log p_train - log p_rollout of each sampled token, and means over the tokens of the mask:

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

from quaver.recipes.scaling import sqnr_db
from quaver.runtime.names import plain_name

HEALTHY = (1.03, 1.05)
"""NeMo-RL's bounds of `token_mult_prob_error`: below the first a run is healthy, above the second it is not."""


@dataclass(frozen=True)
class Mismatch:
    """See the top of the file."""

    k1: float
    k3: float
    token_mult_prob_error: float
    largest: float
    tokens: int
    """Of the mask."""


@torch.no_grad()
def mismatch(logprobs_train: Tensor, logprobs_rollout: Tensor, mask: Tensor | None = None) -> Mismatch:
    """Compare the log probabilities of sampled tokens; sums are in float64.

    Args:
        logprobs_train, logprobs_rollout: floating point, of one shape and on one device, of the same tokens.
        mask: of their shape, 0 or 1 (or bool): which tokens count. None for all.
    Raises:
        ValueError: shapes differ, no token counts, or one that counts has no finite log probability.
    """
    if logprobs_train.shape != logprobs_rollout.shape:
        got = f"{list(logprobs_train.shape)} and {list(logprobs_rollout.shape)}"
        raise ValueError(f"expected log probabilities of the same tokens, of one shape, got {got}")
    if mask is None:
        mask = torch.ones_like(logprobs_train, dtype=torch.bool)
    elif mask.shape != logprobs_train.shape:
        raise ValueError(f"mask: expected {list(logprobs_train.shape)} as log probabilities, got {list(mask.shape)}")
    elif not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask: expected 0 or 1 for each token, got other values")
    counts = mask.bool()
    train, rollout = (each[counts].double() for each in (logprobs_train, logprobs_rollout))
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
    """Of the second model's output against the first's."""
    is_origin: bool
    """Whether its inputs are equal to the bit, so that it makes the difference itself."""


@torch.no_grad()
def first_differences(model: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> list[Difference]:
    """Call both models with the same arguments, and list the layers whose outputs differ, in the order of the forward.

    Layers are the modules without children. The inputs and outputs of all layers of `model` are held meanwhile: use a
    short prompt. The mode of both models stays as it is; compare in eval mode. Where a layer runs several times, its
    last run counts.

    Raises:
        ValueError: the models have no layer of one name in common.
    """
    held: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    found: dict[str, Difference] = {}

    def hold(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        held[name] = [each.clone() for each in inputs], [each.clone() for each in outputs]

    def compare(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        found.pop(name, None)
        if name not in held or _are_equal(held[name][1], outputs):
            return
        pairs = [pair for pair in zip(held[name][1], outputs, strict=False) if pair[0].shape == pair[1].shape]
        worst = min((sqnr_db(*pair) for pair in pairs if pair[0].is_floating_point()), default=float("nan"))
        found[name] = Difference(name, worst, _are_equal(held[name][0], inputs))

    _run(model, hold, args, kwargs)
    common = _layers(model).keys() & _layers(other).keys()
    if not common:
        raise ValueError("expected two models with layers of the same names, got none in common")
    _run(other, compare, args, kwargs)
    return list(found.values())


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {plain_name(f"{name}.")[:-1]: each for name, each in model.named_modules() if not list(each.children())}


def _run(
    model: nn.Module,
    see: Callable[[str, list[Tensor], list[Tensor]], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call `model`, and `see` with the tensors that go into each layer and come out of it."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _, inputs, given, output: see(name, _tensors((inputs, given)), _tensors(output))

    handles = [each.register_forward_hook(hook(name), with_kwargs=True) for name, each in _layers(model).items()]
    try:
        model(*args, **kwargs)
    finally:
        for each in handles:
            each.remove()


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
