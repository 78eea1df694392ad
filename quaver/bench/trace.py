"""Chrome traces of torch.profiler: records one, and reads which work ran in which operator or named range.

The file is read, and not the profiler's own event list, because only the file links a kernel that Python launches
inside a named range (a Triton kernel) to that range.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from quaver.devices import synchronize

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGES = ("cpu_op", "user_annotation")


@dataclass(eq=False)
class Range:
    """An operator or a named range on a host thread; times in microseconds of the trace's clock."""

    name: str
    thread: Any
    start_us: float
    end_us: float
    parent: Range | None = None
    self_us: float = 0.0
    """Without the ranges inside it."""

    def names_outwards(self) -> list[str]:
        """Its name, its parent's, and so on."""
        return [self.name, *(self.parent.names_outwards() if self.parent else ())]


class Kernel(NamedTuple):
    """A kernel, copy or fill on the device, and the host range that launched it, if known."""

    name: str
    us: float
    launched_in: Range | None


class Trace(NamedTuple):
    """The work of a profiled call."""

    ranges: list[Range]
    kernels: list[Kernel]


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
    with tempfile.TemporaryDirectory() as folder:
        return len(record_trace(call, device, Path(folder) / "trace.json").kernels) or None


def read_trace(path: Path) -> Trace:
    """The ranges and kernels of a Chrome trace that torch.profiler wrote."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]

    def of(categories: tuple[str, ...]) -> list[dict[str, Any]]:
        return [event for event in events if event.get("cat") in categories]

    ranges = [
        Range(event["name"], event.get("tid"), event["ts"], event["ts"] + event["dur"])
        for event in of(_RANGES)
        if not event["name"].startswith("ProfilerStep")
    ]
    _nest(ranges)
    launched_in = {
        event["args"]["correlation"]: _innermost(ranges, event.get("tid"), event["ts"])
        for event in of(_LAUNCHES)
        if "correlation" in event.get("args", {})
    }
    kernels = [
        Kernel(event["name"], event["dur"], launched_in.get(event.get("args", {}).get("correlation")))
        for event in of(_DEVICE_WORK)
    ]
    return Trace(ranges, kernels)


def _nest(ranges: list[Range]) -> None:
    """Sort the ranges by start, and set the parent and own time of each, thread by thread."""
    ranges.sort(key=lambda each: (each.start_us, -each.end_us))
    open_ranges: dict[Any, list[Range]] = {}
    for each in ranges:
        stack = open_ranges.setdefault(each.thread, [])
        while stack and stack[-1].end_us <= each.start_us:
            stack.pop()
        each.self_us = each.end_us - each.start_us
        if stack:
            each.parent = stack[-1]
            each.parent.self_us -= each.self_us
        stack.append(each)


def _innermost(ranges: list[Range], thread: Any, at_us: float) -> Range | None:
    inside = [each for each in ranges if each.thread == thread and each.start_us <= at_us < each.end_us]
    return max(inside, key=lambda each: each.start_us, default=None)
