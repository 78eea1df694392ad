"""Models the functions of torch.cuda that the package calls: the card's properties, generators, and memory peaks.

The peaks are those of the whole process, because CPU tensors have no allocator to ask: they are positive and never
fall. Other statistics of the allocator and its history are not modeled, and raise as in a PyTorch without CUDA.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from quaver.roofline.device_specs import find_device_spec

if TYPE_CHECKING:
    from tests.virtual_gpu import Card

DRIVER_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "l40s": "NVIDIA L40S",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}
"""The names that the driver reports, by card."""


@contextlib.contextmanager
def patch_cuda_functions(card: Card) -> Iterator[None]:
    """Let these functions of torch.cuda answer for one GPU like `card` inside the block."""
    spec = find_device_spec(DRIVER_NAMES[card.name])
    properties = SimpleNamespace(
        name=DRIVER_NAMES[card.name],
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=int(1e9 * (spec.memory_gb if spec else 32)),
        L2_cache_size=50 << 20,
    )

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index != 0:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    models = {
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # a PyTorch with CUDA derives it from device_count, and then asks the driver
        "is_current_stream_capturing": lambda: False,
        "set_device": set_device,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: _memory_stats(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": set_rng_state,
    }
    with contextlib.ExitStack() as stack:
        for name, model in models.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, model))
        # A PyTorch with CUDA asks the driver for streams if device_count is not 0.
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", return_value=False))
        yield


def _memory_stats() -> dict[str, int]:
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0}


@contextlib.contextmanager
def refuse_host_reads() -> Iterator[None]:
    """Raise RuntimeError inside the block if the host reads a number from the device."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a number of the device is read on the host")

    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for operator in ("_local_scalar_dense", "nonzero", "equal"):
            library.impl(operator, refuse, "CPU", allow_override=True)
        stack.enter_context(mock.patch.object(torch.Tensor, "tolist", refuse))
        yield


@contextlib.contextmanager
def simulate_capture() -> Iterator[None]:
    """Let torch.cuda answer inside the block that a CUDA graph is captured."""
    with contextlib.ExitStack() as stack:
        for name in ("is_initialized", "is_current_stream_capturing"):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=True))
        yield


@contextlib.contextmanager
def simulate_strict_capture() -> Iterator[None]:
    """Pretend inside the block that a CUDA graph is captured: host reads raise. Nothing is replayed."""
    with simulate_capture(), refuse_host_reads():
        yield
