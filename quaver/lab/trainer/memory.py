"""The memory of a training step: its peak per model, and the numbers of the device's allocator or the OS.

A peak is the model's parameters, buffers and optimizer state plus the growth during the step. So the two models of
`--compare` do not count each other. Each rank measures its own memory.
"""

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.recorder.allocator import measure_usage
from quaver.lab.recorder.storages import TensorByteCounter
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.runtime.devices import is_cuda_device
from quaver.torch_private.memory import storage_key


@dataclass
class PeakMemory:
    """The peak bytes of a step and how they were measured; None if they were not."""

    peak_bytes: int | None = None
    source: str = "not measured"


@contextmanager
def measure_peak(resident: Iterable[Tensor], *, device: torch.device, is_countable: bool) -> Iterator[PeakMemory]:
    """Measure the block, which runs one training step, and fill in the yielded PeakMemory.

    Args:
        resident: the tensors that live between steps: parameters, buffers, optimizer state.
        device: their device.
        is_countable: whether a dispatch mode sees every CPU tensor. It does not see tensors inside compiled code or
            inside the operators of a DTensor. Such steps are read from the CPU allocator's log, without operators'
            scratch, and torch.profiler must be free.
    """
    peak = PeakMemory()
    resident_bytes = count_storage_bytes(resident)
    if is_cuda_device(device):
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
        yield peak
        peak.peak_bytes = resident_bytes + torch.cuda.max_memory_allocated(device) - before_bytes
        peak.source = "torch.cuda.max_memory_allocated"
    elif is_countable:
        with TensorByteCounter() as counted:
            yield peak
        peak.peak_bytes = resident_bytes + counted.peak_bytes
        peak.source = "tensors of one step, exact"
    else:
        with measure_usage(device, allow_leftover=True) as measured:
            measured.mark()  # memory that is alive here does not count
            yield peak
        peak.peak_bytes = resident_bytes + (measured.usage.tensor_peak_bytes or 0)
        peak.source = "tensors of one step, from the CPU allocator's log"


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`; a DTensor counts this rank's part."""
    plain = [part for tensor in tensors for part in list_plain_tensors(tensor)]
    storages = {storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(storages.values())


def reset_device_peaks(device: torch.device) -> None:
    """Reset the peaks of CUDA's allocator, if the device has one."""
    if is_cuda_device(device):
        torch.cuda.reset_peak_memory_stats(device)


def read_device_memory(device: torch.device) -> dict[str, Any]:
    """Return the peaks since `reset_device_peaks`, in bytes and as shares of the device's memory, ready for JSON.

    CUDA: `memory_active_*` is the memory of tensors, and `memory_reserved_*` the memory of the allocator.
    `memory_retries` counts the allocations since the process started that first had to empty the allocator's cache, a
    sign that memory is nearly full. CPU: `memory_peak_rss_*` is the peak resident memory of the process so far.
    """
    if is_cuda_device(device):
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        peaks = {kind: stats[f"{kind}_bytes.all.peak"] for kind in ("active", "reserved")}
        return {
            **{f"memory_{kind}_bytes": peak for kind, peak in peaks.items()},
            **{f"memory_{kind}_share": peak / total for kind, peak in peaks.items()},
            "memory_retries": stats["num_alloc_retries"],
        }
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"memory_peak_rss_bytes": peak, "memory_peak_rss_share": peak / total}


def describe_memory(record: dict[str, Any]) -> str:
    """Return the `read_device_memory` in `record` as text for the log."""
    labels = {"active": "active", "reserved": "reserved", "peak_rss": "peak rss"}
    return ", ".join(
        f"{format_bytes(record[f'memory_{kind}_bytes'])} ({record[f'memory_{kind}_share']:.0%}) {label}"
        for kind, label in labels.items()
        if f"memory_{kind}_bytes" in record
    )
