"""`LastRun`: where and how a float8 module ran last, for reports and checks.

With it a report can tell modules that ran from modules that were only converted.

An eager forward records it in its module. A compiled forward cannot write to its module, so tracing records that
modules of this kind are compiled; nothing else is known about them.
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
"""The time on `_clock` at which a module of each kind was last traced."""


class LastRun:
    """The last eager forward of a float8 module. Copies and pickles start again as "not run yet"."""

    def __init__(self) -> None:
        self.since = next(_clock)
        """The time on `_clock` at which the module was created, converted or copied."""
        self.device: torch.device | None = None
        """The device of the last input; None before the first forward."""
        self.config: Float8LinearConfig | None = None
        """The module's config at that time."""
        self.has_row_codes_only = False
        """Whether its weight was row-wise and stored once at that time."""
        self.backend = "not run yet"
        self.forward: object = None
        """The `forward` attribute of the instance at that time, or None if it had none."""
        self.trained_at = 0
        """The time on `_clock` at which it last ran in training mode with gradients; 0 if never."""

    def __reduce__(self) -> tuple[type[LastRun], tuple[()]]:
        return LastRun, ()


def note_run(
    module: nn.Module,
    device: torch.device,
    config: Float8LinearConfig,
    describe_backends: Callable[..., str],
    *,
    has_row_codes_only: bool = False,
) -> None:
    """Record that a forward of `module` ran on `device`, with the backends that `describe_backends` names.

    `has_row_codes_only`: an argument of `describe_backends`.
    """
    if torch.compiler.is_compiling():
        _note_traced(_get_kind(module))
        return
    run: LastRun = module.__dict__["_last_run"]
    if run.device != device or run.config is not config or run.has_row_codes_only != has_row_codes_only:
        run.device, run.config, run.has_row_codes_only = device, config, has_row_codes_only
        run.backend = describe_backends(config, device, has_row_codes_only=has_row_codes_only)
    run.forward = module.__dict__.get("forward")
    if module.training and torch.is_grad_enabled():
        run.trained_at = next(_clock)


def _get_kind(module: Any) -> tuple[int, ...]:
    """Return a key of the modules that may share a compiled graph: a linear's shape; () for experts."""
    return (module.out_features, module.in_features) if isinstance(module, nn.Linear) else ()


@assume_constant_result
def _note_traced(kind: tuple[int, ...]) -> None:
    _traced_at[kind] = next(_clock)


def has_run(module: Any) -> bool:
    """Return whether `module` has run with the `forward` that it has now."""
    run: LastRun = module._last_run
    return run.device is not None and run.forward is vars(module).get("forward")


def is_idle(module: Any, trained_at: int) -> bool:
    """Return whether `module` never ran, eager or compiled, although its model trained at `trained_at`."""
    run: LastRun = module._last_run
    return run.device is None and _traced_at.get(_get_kind(module), 0) <= run.since < trained_at
