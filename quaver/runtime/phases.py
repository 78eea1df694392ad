"""Names for the phases of float8 work, seen by profilers and by the memory timeline.

    quaver::amax   a pass over a tensor that only computes its amax
    quaver::cast   a cast to float8; it includes the amax if one pass computes both, as the C extension and the kernels
                   for persistent scales do
    quaver::gemm   a matmul of a linear in any precision, or `float8_mm`

A phase costs a call and two lookups when no profiler or recorder runs (docs/profiling.md has the times). Compiled code
has no phases, because the compiler names its kernels.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from quaver.torch_private.profiler import named_range

Function = TypeVar("Function", bound=Callable[..., Any])

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class OpenPhase(NamedTuple):
    """A phase that has begun and not ended, with the arguments of its function."""

    name: str
    arguments: tuple[Any, ...]


tracked_phases: list[OpenPhase] | None = None
"""While a recorder runs, the open phases, innermost last."""


def phase(name: str) -> Callable[[Function], Function]:
    """Decorate a function so that its calls are ranges of this name while a profiler or a recorder runs."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            # This check comes first: it is a constant under Dynamo, which then does not guard on the others.
            if _is_dynamo_compiling() or not (profiler._is_profiler_enabled or tracked_phases is not None):
                return function(*args, **kwargs)
            with open_phase(name, (*args, *kwargs.values())):
                return function(*args, **kwargs)

        return typing.cast(Function, in_phase)

    return decorate


@contextmanager
def open_phase(name: str, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Open a phase of this name around the call of a function with these arguments."""
    open_phases = tracked_phases
    if open_phases is not None:
        open_phases.append(OpenPhase(name, arguments))
    try:
        with named_range(name):
            yield
    finally:
        if open_phases is not None:
            open_phases.pop()


@contextmanager
def track_phases() -> Iterator[list[OpenPhase]]:
    """Yield a list that holds the open phases, innermost last, inside the block.

    Raises:
        RuntimeError: phases are already being tracked.
    """
    global tracked_phases
    if tracked_phases is not None:
        raise RuntimeError("phases are tracked already; only one recording at a time can do so")
    tracked_phases = []
    try:
        yield tracked_phases
    finally:
        tracked_phases = None
