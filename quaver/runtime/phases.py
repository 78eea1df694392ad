"""Names for the phases of float8 work, seen by profilers and by the memory timeline.

    quaver::amax   a pass over a tensor that computes its amax and nothing else
    quaver::cast   a cast to float8, its amax included: the C extension and the kernels for persistent scales compute
                   both in one pass, which is a cast
    quaver::gemm   a matmul of a linear, in any precision; or `float8_mm`

A phase costs a call and two lookups when no profiler or recorder runs. Compiled code has no phases: its kernels have
the names that the compiler gave them. docs/profiling.md has the nanoseconds.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from quaver.torch_private.profiler import named_range as profiler_range

Function = TypeVar("Function", bound=Callable[..., Any])

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class OpenPhase(NamedTuple):
    """A phase that has begun and not ended, and what its function was called with."""

    name: str
    arguments: tuple[Any, ...]


watched: list[OpenPhase] | None = None
"""The phases that are open, the innermost last, while a recorder runs."""


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range in the trace of whatever profiler runs; not an operation, so that no tracer or dispatch mode sees it."""
    return profiler_range(name)


def phase(name: str) -> Callable[[Function], Function]:
    """A decorator: calls of the function are ranges of this name while a profiler or a recorder runs.

    The function takes positional arguments only, because passing keywords on costs as much as the lookups.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def in_phase(*args: Any) -> Any:
            # Asked first, because it is a constant to the compiler, which then guards on neither of the others.
            if _is_dynamo_compiling() or not (profiler._is_profiler_enabled or watched is not None):
                return function(*args)
            with opened(name, args):
                return function(*args)

        return typing.cast(Function, in_phase)

    return decorate


@contextmanager
def opened(name: str, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Around the call of a function with these arguments: a phase of this name."""
    open_phases = watched
    if open_phases is not None:
        open_phases.append(OpenPhase(name, arguments))
    try:
        with named_range(name):
            yield
    finally:
        if open_phases is not None:
            open_phases.pop()


@contextmanager
def watch_phases() -> Iterator[list[OpenPhase]]:
    """Have a list of the phases that are open, the innermost last, inside the block.

    Raises:
        RuntimeError: phases are watched already.
    """
    global watched
    if watched is not None:
        raise RuntimeError("phases are watched already; only one recording at a time can do so")
    watched = []
    try:
        yield watched
    finally:
        watched = None
