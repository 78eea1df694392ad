"""Timing that can be trusted on a noisy machine: all contestants in one process, taking turns; medians and spread."""

from __future__ import annotations

import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from quaver.devices import synchronize

_SHORTEST_SAMPLE_S = 2e-3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the samples and their 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        ordered = sorted(1e6 * s for s in seconds)
        last = len(ordered) - 1
        return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def time_alternating(
    contestants: dict[str, Callable[[], None]], device: torch.device, *, rounds: int, warmup: int = 3
) -> dict[str, Timing]:
    """Time each contestant once per round, starting each round with the next one.

    A sample is a run of as many calls as last 2 ms together, so that short calls are not lost in the clock.
    """
    calls = {name: _calls_per_sample(function, device, warmup) for name, function in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(contestants[name], device, calls[name]))
    return {name: Timing.of(times) for name, times in samples.items()}


def _calls_per_sample(function: Callable[[], None], device: torch.device, warmup: int) -> int:
    for _ in range(warmup):
        function()
    return max(1, round(_SHORTEST_SAMPLE_S / min(_sample(function, device, 1) for _ in range(3))))


def _sample(function: Callable[[], None], device: torch.device, calls: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def environment(device: torch.device) -> dict[str, Any]:
    """What a result needs beside it to mean something: hardware, versions, commit, command, date."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": "quaver " + shlex.join(sys.argv[1:]),
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    features = torch.backends.cpu.get_cpu_capability()
    amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{platform.machine()} CPU, {features}{amx}"


def _commit() -> str:
    try:
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()
