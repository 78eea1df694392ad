"""Times contestants that alternate in one process, on inputs that are not in cache, for medians and their spread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from quaver.runtime.devices import is_cuda_device, synchronize

Input = TypeVar("Input")
Name = TypeVar("Name", bound=Hashable)

_MIN_SAMPLE_S = 2e-3
"""The wait for a GPU at its end takes about 10 us, which is 0.5% of it; a clock's tick takes less."""

_DEFAULT_CACHE_BYTES = 64 << 20
"""More than the 50 MiB of an H100's L2 and the 32 MiB of L3 that 8 cores of an EPYC share."""
_MAX_ROTATION_BYTES = 512 << 20
"""Bounds the memory of all copies where a server's L3 is large. No GPU comes near: a B200's L2 has 126 MiB."""
_MAX_ROTATION_COPIES = 256
"""Bounds the copies of inputs below 0.5 MiB where the cache is unknown. A CPU reads 0.5 MiB in 50 us at 10 GB/s."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, the 10th and 90th percentiles and the minimum of the samples."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    min_us: float

    @staticmethod
    def from_seconds(seconds: list[float]) -> Timing:
        """Return the timing of samples in seconds."""
        ordered = sorted(1e6 * s for s in seconds)
        last = len(ordered) - 1
        percentiles = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return Timing(statistics.median(ordered), *percentiles, len(ordered), ordered[0])


def time_alternating(
    contestants: Mapping[Name, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    until_done: bool = True,
) -> dict[Name, Timing]:
    """Time each contestant once per round; each round starts with the next contestant.

    A sample is a number of calls that take 2 ms together, so that the clock's resolution does not matter.

    Args:
        until_done: wait for the device inside a sample; False stops the clock when the host has queued the work.
    """
    calls = {name: _count_calls_per_sample(function, device, warmup) for name, function in contestants.items()}
    samples: dict[Name, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_time_sample(contestants[name], device, calls[name], until_done=until_done))
    return {name: Timing.from_seconds(times) for name, times in samples.items()}


def _count_calls_per_sample(function: Callable[[], object], device: torch.device, warmup: int) -> int:
    for _ in range(warmup):
        function()
    return max(1, round(_MIN_SAMPLE_S / min(_time_sample(function, device, 1) for _ in range(3))))


def _time_sample(function: Callable[[], object], device: torch.device, calls: int, *, until_done: bool = True) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if until_done:
        synchronize(device)
    return (time.perf_counter() - start) / calls


def find_cache_bytes(device: torch.device) -> int | None:
    """Return the size of a GPU's L2 or a CPU's L3, or None if the system does not report it."""
    if is_cuda_device(device):
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or None
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")) or None  # 0 or -1 if the system does not know
    except (ValueError, OSError):  # a system without that name, or without a value for it
        return None


class Rotation(Generic[Input]):
    """Equal inputs in different memory. `next` returns them in turn, so that no call finds its input in cache.

    The copies fill twice the last-level cache, at most `_MAX_ROTATION_BYTES`, or there are `_MAX_ROTATION_COPIES`: the
    call itself takes most of the time of smaller inputs.
    """

    def __init__(self, make_input: Callable[[], Input], copy_bytes: int, device: torch.device) -> None:
        """Call `make_input` once per copy of `copy_bytes` bytes, and at least once."""
        wanted = 2 * (find_cache_bytes(device) or _DEFAULT_CACHE_BYTES)
        copies = -(-min(wanted, _MAX_ROTATION_BYTES) // max(1, copy_bytes))
        self._inputs = [make_input() for _ in range(min(max(1, copies), _MAX_ROTATION_COPIES))]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._inputs)

    def next(self) -> Input:
        """Return the least recently used copy."""
        self._turn = (self._turn + 1) % len(self._inputs)
        return self._inputs[self._turn]
