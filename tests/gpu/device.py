"""The GPU of these tests: a CUDA device, or with QUAVER_VIRTUAL_GPU=h100 a virtual one (tests/virtual_gpu)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from quaver.runtime.devices import standing_for_gpu
from tests.virtual_gpu.runtime import host_reads_refused

VIRTUAL = os.environ.get("QUAVER_VIRTUAL_GPU", "")
DEVICE = "cpu" if VIRTUAL else "cuda"
BACKEND = "aot_eager" if VIRTUAL else "inductor"
"""Of torch.compile: a CPU's Inductor is not to compile what a GPU's would."""


def needs_silicon(reason: str) -> pytest.MarkDecorator:
    """Skip a test on the virtual GPU, which does not model what it is about."""
    return pytest.mark.skipif(bool(VIRTUAL), reason=f"only a GPU can say: {reason}")


def host() -> contextlib.AbstractContextManager[None]:
    """Inside the block CPU tensors take a CPU's code."""
    return standing_for_gpu(None)


def host_and_gpu() -> Iterator[str]:
    """ "cpu" with a CPU's code, then DEVICE with a GPU's."""
    with host():
        yield "cpu"
    yield DEVICE


@contextlib.contextmanager
def waiting_refused() -> Iterator[None]:
    """Inside the block what reads a number of the device on the host raises RuntimeError."""
    if not VIRTUAL:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with host_reads_refused():
        yield
