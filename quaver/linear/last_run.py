"""`LastRun`: where and how a float8 module multiplied last, so that a report can tell what ran from what was converted.

An eager forward notes it in its module, whoever called that forward. A compiled one cannot write to its module; tracing
notes that modules of its kind are compiled, and of those nothing is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quaver.recipes.config import Float8LinearConfig
from quaver.torch_private.tracing import assume_constant_result

_clock = itertools.count(1)
_traced_at: dict[tuple[int, ...], int] = {}
"""When a module of each kind was traced last, on the clock."""


class LastRun:
    """The last eager forward of one float8 module. A copy of it, or a pickle, is of a module that has not run."""

    def __init__(self) -> None:
        self.since = next(_clock)
        """When the module was converted, made or copied, on a clock of this process."""
        self.device: torch.device | None = None
        """The device of the last forward's input; None before it."""
        self.backend = "not run yet"
        self.forward: object = None
        """The instance's `forward` at that time, which replaces the class's; None for the class's."""
        self.trained_at = 0
        """When it ran last in training mode with gradients, on the clock; 0 if it has not."""

    def __reduce__(self) -> tuple[type[LastRun], tuple[()]]:
        return LastRun, ()


def note_run(
    module: nn.Module,
    device: torch.device,
    config: Float8LinearConfig,
    backends_of: Callable[[Float8LinearConfig, torch.device], str],
) -> None:
    """Note that a forward of `module` multiplied on `device`; `backends_of` says what multiplies there."""
    if torch.compiler.is_compiling():
        _note_traced(_kind(module))
        return
    run: LastRun = module.__dict__["_last_run"]
    if run.device != device:
        run.device, run.backend = device, backends_of(config, device)
    run.forward = module.__dict__.get("forward")
    if module.training and torch.is_grad_enabled():
        run.trained_at = next(_clock)


def _kind(module: Any) -> tuple[int, ...]:
    """Identifies the modules that may share a compiled graph: a linear's shape; () for experts."""
    return (module.out_features, module.in_features) if isinstance(module, nn.Linear) else ()


@assume_constant_result
def _note_traced(kind: tuple[int, ...]) -> None:
    _traced_at[kind] = next(_clock)


def has_run(module: Any) -> bool:
    """Whether the float8 `module` has run as it is now: under the forward that its instance has."""
    run: LastRun = module._last_run
    return run.device is not None and run.forward is vars(module).get("forward")


def is_idle(module: Any, trained_at: int) -> bool:
    """Whether `module` never ran, eager or perhaps compiled, though others of its model trained at `trained_at`."""
    run: LastRun = module._last_run
    return run.device is None and _traced_at.get(_kind(module), 0) <= run.since < trained_at
