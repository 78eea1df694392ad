"""Devices: chosen by name, waited for and described."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


class MissingDeviceError(RuntimeError):
    """A device was asked for that this machine does not have."""


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda, or auto for CUDA where there is one.

    Raises:
        MissingDeviceError: if CUDA is asked for and torch sees none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingDeviceError(
            "device cuda was asked for, but torch sees no CUDA device here; choose cpu, or install "
            f"a torch built for this GPU (this one is torch {torch.__version__})"
        )
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done its queued work, so that the clock includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a reader of the results must know about hardware and versions, JSON-able."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"CPU {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
