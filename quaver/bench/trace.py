"""One profiled call, and what its Chrome trace says ran on the device and on the host."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from quaver.devices import synchronize

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGES = ("cpu_op", "user_annotation")


@dataclass(eq=False)
class Range:
    """An operator or a named range on a host thread. Times in microseconds, of the trace's clock."""

    name: str
    thread: Any
    start_us: float
    end_us: float
    parent: Range | None = None
    self_us: float = 0.0
    """What no range inside it covers."""

    def names_outwards(self) -> list[str]:
        """Its name, its parent's, and so on."""
        names = [self.name]
        return names + (self.parent.names_outwards() if self.parent else [])


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device: a kernel, a copy or a fill; and the host range that launched it, if known."""

    name: str
    us: float
    launched_in: Range | None


@dataclass
class Trace:
    """What happened in a profiled call."""

    ranges: list[Range] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def record_trace(call: Callable[[], object], device: torch.device, path: Path) -> Trace:
    """Profile one call, which has been warmed up, write its Chrome trace to `path` (.json or .json.gz) and read it."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    synchronize(device)
    with profile(activities=activities) as profiler:
        call()
        synchronize(device)
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def count_kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """How many kernels, copies and fills one call launches; None on a CPU, and where the profiler sees none."""
    if device.type != "cuda":
        return None
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        return len(record_trace(call, device, Path(path)).kernels) or None
    finally:
        os.unlink(path)


def read_trace(path: Path) -> Trace:
    """The ranges and kernels of a Chrome trace that torch.profiler wrote."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    ranges = _nested(
        [
            Range(event["name"], event.get("tid"), event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") in _RANGES and not event["name"].startswith("ProfilerStep")
        ]
    )
    launches = {
        event["args"]["correlation"]: _innermost(ranges, event.get("tid"), event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [
        Kernel(event["name"], event["dur"], launches.get(event.get("args", {}).get("correlation")))
        for event in events
        if event.get("cat") in _DEVICE_WORK
    ]
    return Trace(ranges, kernels)


def _nested(ranges: list[Range]) -> list[Range]:
    """Say of each range which one it lies in, thread by thread, and how long it is without those inside it."""
    ordered = sorted(ranges, key=lambda each: (each.start_us, -each.end_us))
    open_ranges: dict[Any, list[Range]] = {}
    for each in ordered:
        stack = open_ranges.setdefault(each.thread, [])
        while stack and stack[-1].end_us <= each.start_us:
            stack.pop()
        each.self_us = each.end_us - each.start_us
        if stack:
            each.parent = stack[-1]
            each.parent.self_us -= each.self_us
        stack.append(each)
    return ordered


def _innermost(ranges: list[Range], thread: Any, at_us: float) -> Range | None:
    inside = [each for each in ranges if each.thread == thread and each.start_us <= at_us < each.end_us]
    return max(inside, key=lambda each: each.start_us, default=None)
