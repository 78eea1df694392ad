"""Devices: chosen by name, waited for and described; and which device's code a tensor takes.

What depends on the device asks `is_cpu`, `is_cuda`, `is_cuda_device` and `has_cuda` here, so that tests and
predictions can have CPU tensors take a GPU's code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_virtual: tuple[int, int] | None = None
"""The compute capability of the GPU that CPU tensors stand for; None where they are a CPU's."""
_virtually_capturing = False


class MissingDeviceError(RuntimeError):
    """A device was asked for that this machine does not have."""


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda, or auto for CUDA where there is one.

    Raises:
        MissingDeviceError: if CUDA is asked for and torch sees none.
    """
    if name == "auto":
        name = "cuda" if has_cuda() else "cpu"
    if name == "cuda" and not has_cuda():
        raise MissingDeviceError(
            "device cuda was asked for, but torch sees no CUDA device here; choose cpu, or install "
            f"a torch built for this GPU (this one is torch {torch.__version__})"
        )
    return cuda_device() if name == "cuda" else torch.device(name)


def is_cpu(tensor: Tensor) -> bool:
    """Whether `tensor` takes the code for CPUs."""
    return tensor.is_cpu and _virtual is None


def is_cuda(tensor: Tensor) -> bool:
    """Whether `tensor` takes the code for CUDA (or ROCm) devices."""
    return tensor.is_cuda or (_virtual is not None and tensor.is_cpu)


def is_cuda_device(device: torch.device) -> bool:
    """`is_cuda` of the tensors on `device`."""
    return device.type == "cuda" or (_virtual is not None and device.type == "cpu")


def cuda_device(index: int | None = None) -> torch.device:
    """The CUDA device with this index; None for the current one."""
    if _virtual is not None:
        return torch.device("cpu")
    return torch.device("cuda") if index is None else torch.device("cuda", index)


def has_cuda() -> bool:
    """Whether there is a CUDA device."""
    return _virtual is not None or torch.cuda.is_available()


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    if _virtual is not None:
        return _virtually_capturing
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute_capability(index: int | None) -> tuple[int, int]:
    """The compute capability of the CUDA device with this index, (9, 0) for an H100; None for the current device."""
    return _compute_capability(index) if _virtual is None else _virtual


@functools.cache
def _compute_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@contextlib.contextmanager
def standing_for_gpu(capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside the block CPU tensors take the code for a GPU of this compute capability, with None that for a CPU.

    For tests and predictions, in one thread.
    """
    global _virtual
    before, _virtual = _virtual, capability
    try:
        yield
    finally:
        _virtual = before


@contextlib.contextmanager
def standing_for_capture() -> Iterator[None]:
    """Inside the block, within `standing_for_gpu`, a CUDA graph counts as captured. For tests, in one thread."""
    global _virtually_capturing
    before, _virtually_capturing = _virtually_capturing, True
    try:
        yield
    finally:
        _virtually_capturing = before


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done its queued work, so that the clock includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a reader of the results must know about hardware and versions, JSON-able."""
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda_device(device) else f"CPU {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
