"""Timing that can be trusted on a noisy machine: all contestants in one process, taking turns; medians and spread."""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quaver.devices import synchronize
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.trainer.run_folder import git_revision

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
    contestants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    until_done: bool = True,
) -> dict[str, Timing]:
    """Time each contestant once per round, starting each round with the next one.

    A sample is a run of as many calls as last 2 ms together, so that short calls are not lost in the clock.

    Args:
        until_done: wait for the device inside a sample; False stops the clock once the host has done its part.
    """
    calls = {name: _calls_per_sample(function, device, warmup) for name, function in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(contestants[name], device, calls[name], until_done))
    return {name: Timing.of(times) for name, times in samples.items()}


def _calls_per_sample(function: Callable[[], object], device: torch.device, warmup: int) -> int:
    for _ in range(warmup):
        function()
    return max(1, round(_SHORTEST_SAMPLE_S / min(_sample(function, device, 1) for _ in range(3))))


def _sample(function: Callable[[], object], device: torch.device, calls: int, until_done: bool = True) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if until_done:
        synchronize(device)
    return (time.perf_counter() - start) / calls


def environment(device: torch.device) -> dict[str, Any]:
    """What a result needs beside it to mean something: hardware, versions, commit, command, date."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda, "hip": torch.version.hip} if is_cuda else {}),
        "commit": _commit(),
        "command": "quaver " + shlex.join(sys.argv[1:]),
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    features = torch.backends.cpu.get_cpu_capability()
    units = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    if not has_bfloat16_units("cpu"):
        units = " without bfloat16 instructions"
    return f"{platform.machine()} CPU, {features}{units}"


def _commit() -> str:
    """The commit of quaver's own checkout, with "+" where its files differ from it."""
    revision = git_revision(Path(__file__).parent)
    return "unknown" if revision is None else revision["commit"][:7] + ("+" if revision["is_modified"] else "")
