"""`LastRun`: where and how a float8 module ran last, for reports and checks.

With it a report can tell modules that ran from modules that were only converted.

An eager forward records it in its module. A compiled forward cannot write to its module, so tracing records on which
device modules of this kind are compiled. Their backends follow from the device and the config, as in an eager forward.
One trace stands for all modules of its kind, which may share the compiled code. So a module that nothing calls counts
as run once another one of its kind was traced: only an op in the graph could tell them apart, in every step.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from quaver.recipes.config import Float8LinearConfig
from quaver.torch_private.tracing import assume_constant_result

_clock = itertools.count(1)


class _Trace(NamedTuple):
    """How a module of one kind was last traced."""

    at: int
    """The time on `_clock`."""
    device: torch.device
    has_row_codes_only: bool


_traces: dict[str, _Trace] = {}
"""The last trace of each kind of modules."""


class LastRun:
    """The last eager forward of a float8 module. Copies and pickles start again as "not run yet"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """A name of the modules that may share a compiled graph. Text, because numbers may be symbolic in a trace."""
        self.since = next(_clock)
        """The time on `_clock` at which the module was created, converted or copied."""
        self.noted_at = 0
        """The time on `_clock` at which a forward last set `device`, `config`, `has_row_codes_only` and `backend`."""
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

    def __reduce__(self) -> tuple[type[LastRun], tuple[str]]:
        return LastRun, (self.kind,)


def note_run(module: Any, device: torch.device, *, has_row_codes_only: bool = False) -> None:
    """Record that a forward of `module`, a Float8Module, ran on `device`.

    `has_row_codes_only`: whether its weight is row-wise and stored once.
    """
    if torch.compiler.is_compiling():
        _note_traced(module._last_run.kind, device, has_row_codes_only)
        return
    run: LastRun = module.__dict__["_last_run"]
    config = module.float8_config
    if run.device != device or run.config is not config or run.has_row_codes_only != has_row_codes_only:
        run.device, run.config, run.has_row_codes_only = device, config, has_row_codes_only
        run.backend = module._describe_backends(config, device, has_row_codes_only=has_row_codes_only)
        run.noted_at = next(_clock)
    run.forward = module.__dict__.get("forward")
    if module.training and torch.is_grad_enabled():
        run.trained_at = next(_clock)


@assume_constant_result
def _note_traced(kind: str, device: torch.device, has_row_codes_only: bool) -> None:
    _traces[kind] = _Trace(next(_clock), device, has_row_codes_only)


def _find_trace(module: Any) -> _Trace | None:
    """Return the last trace of this kind of modules if it is newer than what the module's own forward recorded."""
    run, trace = module._last_run, _traces.get(module._last_run.kind)
    return trace if trace is not None and trace.at > max(run.since, run.noted_at) else None


def get_last_device(module: Any) -> torch.device | None:
    """Return the device of the last forward of `module`, eager or compiled, or None if it did not run."""
    trace, run = _find_trace(module), module._last_run
    device: torch.device | None = run.device if trace is None else trace.device
    return device


def describe_last_backends(module: Any) -> str:
    """Return the backends of the last forward of `module`, eager or compiled, or "not run yet"."""
    trace = _find_trace(module)
    if trace is None:
        backend: str = module._last_run.backend
    else:
        backend = module._describe_backends(
            module.float8_config, trace.device, has_row_codes_only=trace.has_row_codes_only
        )
    return backend


def has_run(module: Any) -> bool:
    """Return whether `module` has run with the `forward` that it has now."""
    run: LastRun = module._last_run
    return run.device is not None and run.forward is vars(module).get("forward")


def is_idle(module: Any, trained_at: int) -> bool:
    """Return whether `module` did not run and none of its kind was traced, although its model trained at that time."""
    run: LastRun = module._last_run
    return run.device is None and _find_trace(module) is None and run.since < trained_at
