"""Selects and synchronizes devices, and decides which device's code path a tensor uses.

Code that depends on the device calls `is_cpu`, `is_cuda`, `is_cuda_device` and `has_cuda`, so that CPU tensors can use
a GPU's code path inside `simulate_gpu`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_simulated_capability: tuple[int, int] | None = None
"""The compute capability of the GPU that CPU tensors simulate; None without a simulation."""


class MissingDeviceError(RuntimeError):
    """The requested device does not exist on this machine."""


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda, or auto, which is CUDA if there is a GPU, else the CPU.

    Raises:
        MissingDeviceError: `name` is cuda and torch sees no GPU.
    """
    if name == "auto":
        name = "cuda" if has_cuda() else "cpu"
    if name == "cuda" and not has_cuda():
        raise MissingDeviceError(
            "device cuda was asked for, but torch sees no CUDA device here; choose cpu, or install "
            f"a torch built for this GPU (this one is torch {torch.__version__})"
        )
    return get_cuda_device() if name == "cuda" else torch.device(name)


def is_cpu(tensor: Tensor) -> bool:
    """Return whether `tensor` uses the code path for CPUs; a CPU tensor does not inside `simulate_gpu`."""
    return tensor.is_cpu and _simulated_capability is None


def is_cuda(tensor: Tensor) -> bool:
    """Return whether `tensor` uses the code path for CUDA or ROCm devices; a CPU tensor does inside `simulate_gpu`."""
    return tensor.is_cuda or (_simulated_capability is not None and tensor.is_cpu)


def is_cuda_device(device: torch.device) -> bool:
    """Return `is_cuda` of tensors on `device`."""
    return device.type == "cuda" or (_simulated_capability is not None and device.type == "cpu")


def get_cuda_device(index: int | None = None) -> torch.device:
    """Return the CUDA device with this index; None for the current one."""
    if _simulated_capability is not None:
        return torch.device("cpu")
    return torch.device("cuda") if index is None else torch.device("cuda", index)


def add_device_index(device: torch.device) -> torch.device:
    """Return `device` as tensors on it name it: with the index of the current device if it has none."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device() if module.is_initialized() else 0)


def get_device_index(device: torch.device) -> int:
    """Return the index of `device`; without one, that of the current device, and 0 for a CPU."""
    return add_device_index(device).index or 0


def has_cuda() -> bool:
    """Return whether there is a CUDA device."""
    return _simulated_capability is not None or torch.cuda.is_available()


def is_capturing() -> bool:
    """Return whether the current stream is capturing a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def get_compute_capability(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, (9, 0) for an H100. `index`: None for the current device."""
    if _simulated_capability is not None:
        return _simulated_capability
    return _get_compute_capability(torch.cuda.current_device() if index is None else index)


@functools.cache
def _get_compute_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@contextlib.contextmanager
def simulate_gpu(capability: tuple[int, int] | None) -> Iterator[None]:
    """Make CPU tensors use the code path of a GPU of this compute capability; None for the code path of a CPU.

    A prediction of memory runs a GPU's code on fake CPU tensors, because PyTorch without CUDA cannot differentiate fake
    CUDA tensors. Tests run that code on CPU tensors. Both use one thread.
    """
    global _simulated_capability
    previous, _simulated_capability = _simulated_capability, capability
    try:
        yield
    finally:
        _simulated_capability = previous


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its queued work, so that a timing includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
