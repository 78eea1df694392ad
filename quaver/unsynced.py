"""Notices that `sync_float8_amax_and_scale_history` was forgotten: two optimizer steps of a model without one between.

Without a sync nothing fails: scales stay as they are, and tensors that outgrow them saturate. Nothing in a forward can
tell, for compiled code runs no Python and a step may have many microbatches. An optimizer's step can.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Synced(Protocol):
    """What has to be synced once a step."""

    steps_since_sync: int
    warned: bool
    delayed_rows: list[bool]
    trained_modules: WeakSet[nn.Module]
    """The model, or modules of it."""


_watched: WeakSet[Any] = WeakSet()
_trained: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Synced, bool]] = WeakKeyDictionary()
_hooks: list[Any] = []


def watch_optimizers(state: Synced) -> None:
    """Count the steps of every optimizer that holds a parameter of one of the state's modules."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))
    _watched.add(state)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or all(_stands_still(group) for group in optimizer.param_groups):
        return
    for state in _watched:
        if not state.warned and _trains(optimizer, state):
            state.steps_since_sync += 1
            if state.steps_since_sync == 2 and any(state.delayed_rows):
                state.warned = True
                warnings.warn(
                    "two optimizer steps without sync_float8_amax_and_scale_history(model) between them: delayed "
                    "scales stay as they are until it is called. Call it once a step, after the backward",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _stands_still(group: dict[str, Any]) -> bool:
    """Whether a step changes nothing, as one of torch.distributed.checkpoint that makes an optimizer's state."""
    rate = group.get("lr")
    if isinstance(rate, Tensor) and not rate.is_cpu:
        return False  # the device would have to be asked
    return rate is not None and float(rate) == 0


def _trains(optimizer: Optimizer, state: Synced) -> bool:
    known = _trained.setdefault(optimizer, WeakKeyDictionary())
    if state not in known:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known[state] = any(id(p) in held for module in state.trained_modules for p in module.parameters())
    return known[state]
