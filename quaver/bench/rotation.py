"""Inputs that no cache still holds: equal ones in different memory, used in turn.

A benchmark that calls a function again and again with one small tensor measures the cache. Here each call takes the
next of as many copies as together are twice the last-level cache (a GPU's L2, a CPU's L3), but at most 256: an input
that is a hundred times smaller than the cache costs its call, and hardly its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Input = TypeVar("Input")

_TIMES_THE_CACHE = 2
_UNKNOWN_CACHE_BYTES = 64 << 20
_MOST_COPIES = 256
_MOST_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}


def last_level_cache_bytes(device: torch.device) -> int | None:
    """The size of the last cache before a device's memory; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or None
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or None
    except (ValueError, OSError):  # a system without that name, or without an answer
        return None


class Rotation(Generic[Input]):
    """Copies of one input, handed out in turn by `next`. The turn is shared by all contestants."""

    def __init__(self, make: Callable[[], Input], bytes_each: int, device: torch.device) -> None:
        """`make` is called once for each copy, which has `bytes_each`; there is at least one."""
        wanted = _TIMES_THE_CACHE * (last_level_cache_bytes(device) or _UNKNOWN_CACHE_BYTES)
        copies = -(-min(wanted, _MOST_BYTES[device.type]) // max(1, bytes_each))
        self._inputs = [make() for _ in range(min(max(1, copies), _MOST_COPIES))]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._inputs)

    def next(self) -> Input:
        """The copy that was used longest ago."""
        self._turn = (self._turn + 1) % len(self._inputs)
        return self._inputs[self._turn]
