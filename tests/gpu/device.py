"""Chooses the GPU of these tests: a CUDA device, or with QUAVER_VIRTUAL_GPU=h100 a virtual one (tests/virtual_gpu)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quaver.runtime.devices import simulate_gpu
from tests.virtual_gpu.runtime import refuse_host_reads

VIRTUAL = os.environ.get("QUAVER_VIRTUAL_GPU", "")
DEVICE = "cpu" if VIRTUAL else "cuda"
BACKEND = "aot_eager" if VIRTUAL else "inductor"
"""The backend of torch.compile, without Inductor on a virtual GPU: it would write a CPU's code."""


def needs_silicon(reason: str) -> pytest.MarkDecorator:
    """Skip a test on the virtual GPU, which does not model the subject of the test."""
    return pytest.mark.skipif(bool(VIRTUAL), reason=f"only a GPU can say: {reason}")


def smaller(size: Any, interpreted: Any) -> Any:
    """Return `size`, or on a virtual GPU one that suits the interpreter and has the same masks and edges."""
    return interpreted if VIRTUAL else size


def host() -> contextlib.AbstractContextManager[None]:
    """Let CPU tensors take a CPU's code inside the block."""
    return simulate_gpu(None)


def host_and_gpu() -> Iterator[str]:
    """Yield "cpu" with a CPU's code, then DEVICE with a GPU's."""
    with host():
        yield "cpu"
    yield DEVICE


@contextlib.contextmanager
def host_sync_refused() -> Iterator[None]:
    """Raise RuntimeError inside the block if the host reads a number from the device."""
    if not VIRTUAL:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with refuse_host_reads():
        yield


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Use another stream inside the block, as before a graph is captured; a virtual GPU has only one."""
    if VIRTUAL:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


class Graph:
    """A CUDA graph of a function that returns tensors; on a virtual GPU, calls that read no number on the host.

    Call the function once before, because a first call compiles and runs trials.
    """

    def __init__(self, function: Callable[[], list[torch.Tensor | None]]) -> None:
        self.function, self.graph = function, None if VIRTUAL else torch.cuda.CUDAGraph()
        with host_sync_refused() if self.graph is None else torch.cuda.graph(self.graph):
            self.results = function()

    def replay(self) -> None:
        """Compute the results again, in their memory."""
        if self.graph is not None:
            self.graph.replay()
            return
        with host_sync_refused():
            results = self.function()
        for result, new in zip(self.results, results, strict=True):
            if result is not None:
                result.data.copy_(new.data)
