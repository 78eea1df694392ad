"""`LastRun`: where and how a float8 module ran last, for reports and checks.

With it a report can tell modules that ran from modules that were only converted.

An eager forward records it in its module. Compiled code cannot write to a module, so the trace of a forward records its
device. The backends follow from the device and the config, as in an eager forward. Compiled code may also run other
modules of the same kind, such as those of later blocks, which Dynamo does not trace. So in a report on a model one
trace stands for all modules of its kind in that model (`find_traces`). A module that nothing calls counts as run once
another one of its kind was traced: only an op in the graph could tell them apart, in every step. Code that was traced
in another model may run a module, too. That is unknown, so its backend is "not run yet", and it is not idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from quaver.recipes.config import Float8LinearConfig
from quaver.torch_private.tracing import assume_constant_result

_clock = itertools.count(1)


class Trace(NamedTuple):
    """How a forward was last traced."""

    traced_at: int
    """The time on `_clock`."""
    device: torch.device
    has_row_codes_only: bool


_traced_at: dict[str, int] = {}
"""The time on `_clock` of the last trace of each kind of modules in this process."""


class LastRun:
    """The last eager forward and the last trace of a float8 module. Copies and pickles start again as "not run yet"."""

    def __init__(self, kind: str, had_grad: bool = False) -> None:
        self.kind = kind
        """A name of the modules that may share compiled code."""
        self.had_grad = had_grad
        """Whether a parameter had a gradient when the module was created, converted or copied."""
        self.created_at = next(_clock)
        """The time on `_clock` at which the module was created, converted or copied."""
        self.recorded_at = 0
        """The time on `_clock` at which a forward last set `device`, `config`, `has_row_codes_only` and `backend`."""
        self.device: torch.device | None = None
        """The device of the last input; None before the first forward."""
        self.config: Float8LinearConfig | None = None
        """The module's config at that time."""
        self.has_row_codes_only = False
        """Whether its weight was rowwise and stored once at that time."""
        self.backend = "not run yet"
        self.forward: object = None
        """The `forward` attribute of the instance at that time, or None if it had none."""
        self.trained_at = 0
        """The time on `_clock` at which it last ran in training mode with gradients; 0 if never."""
        self.trace: Trace | None = None

    def __reduce__(self) -> tuple[type[LastRun], tuple[str, bool]]:
        return LastRun, (self.kind, self.had_grad)

    @assume_constant_result
    def record_trace(self, device: torch.device, has_row_codes_only: bool) -> None:
        """Record that Dynamo traces a forward. Dynamo calls a method without a guard on the identity of its object."""
        self.trace = Trace(next(_clock), device, has_row_codes_only)
        _traced_at[self.kind] = self.trace.traced_at


def record_run(module: Any, device: torch.device, *, has_row_codes_only: bool = False) -> None:
    """Record that a forward of `module`, a Float8Module, ran on `device`.

    `has_row_codes_only`: whether its weight is rowwise and stored once.
    """
    if torch.compiler.is_compiling():
        module._last_run.record_trace(device, has_row_codes_only)
        return
    run: LastRun = module.__dict__["_last_run"]
    config = module.float8_config
    if run.device != device or run.config is not config or run.has_row_codes_only != has_row_codes_only:
        run.device, run.config, run.has_row_codes_only = device, config, has_row_codes_only
        run.backend = module._describe_backends(config, device, has_row_codes_only=has_row_codes_only)
        run.recorded_at = next(_clock)
    run.forward = module.__dict__.get("forward")
    if module.training and torch.is_grad_enabled():
        run.trained_at = next(_clock)


def find_traces(modules: Iterable[Any]) -> dict[str, Trace]:
    """Return the last trace of each kind of float8 modules among `modules`, which are those of one model."""
    runs = (vars(module).get("_last_run") for module in modules)
    traces = [(run.trace, run.kind) for run in runs if run is not None and run.trace is not None]
    return {kind: trace for trace, kind in sorted(traces, key=lambda trace_and_kind: trace_and_kind[0].traced_at)}


def _select_newer(run: LastRun, traces: Mapping[str, Trace]) -> Trace | None:
    """Return the trace of this kind if it is newer than what the module's own forward recorded."""
    trace = traces.get(run.kind)
    return trace if trace is not None and trace.traced_at > max(run.created_at, run.recorded_at) else None


def get_last_device(module: Any, traces: Mapping[str, Trace]) -> torch.device | None:
    """Return the device of the last forward of `module`, eager or compiled, or None if it did not run.

    `traces`: the traces of its model, from `find_traces`.
    """
    run: LastRun = module._last_run
    trace = _select_newer(run, traces)
    return run.device if trace is None else trace.device


def describe_last_backends(module: Any, traces: Mapping[str, Trace]) -> str:
    """Return the backends of the last forward of `module`, eager or compiled, or "not run yet".

    `traces`: the traces of its model, from `find_traces`.
    """
    run: LastRun = module._last_run
    trace = _select_newer(run, traces)
    if trace is None:
        return run.backend
    return module._describe_backends(module.float8_config, trace.device, has_row_codes_only=trace.has_row_codes_only)


def has_run(module: Any) -> bool:
    """Return whether `module` has run with the `forward` that it has now."""
    run: LastRun = module._last_run
    return run.device is not None and run.forward is vars(module).get("forward")


def may_have_run(module: Any) -> bool:
    """Return whether `module` ran, or compiled code may have run it: one of its kind was traced since it was made."""
    run: LastRun = module._last_run
    return run.device is not None or _traced_at.get(run.kind, 0) > run.created_at
