"""What kind of device predictions are for: a CPU, or an NVIDIA GPU that multiplies float8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DEVICES = ("cpu", "cuda")

_target = "cpu"


@contextmanager
def predicting_for(device: str) -> Iterator[None]:
    """Make the predictions inside the block those of a step on `device`, one of DEVICES. Outside they are a CPU's.

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
