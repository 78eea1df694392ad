"""The device that predictions are for: a CPU, or an NVIDIA GPU with float8 matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DEVICES = ("cpu", "cuda")

_target = "cpu"


@contextmanager
def predicting_for(device: str) -> Iterator[None]:
    """Predict for `device`, one of DEVICES, inside the block; outside for a CPU.

    Raises:
        ValueError: another device.
    """
    global _target
    if device not in DEVICES:
        raise ValueError(f"expected a device to predict for, {' or '.join(DEVICES)}, got {device!r}")
    before, _target = _target, device
    try:
        yield
    finally:
        _target = before


def is_for_a_gpu() -> bool:
    """Whether predictions are for a GPU now."""
    return _target == "cuda"
