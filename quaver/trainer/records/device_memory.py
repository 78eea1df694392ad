"""What a step took of the device's memory, as its allocator, or on a CPU the operating system, counts it."""

import os
import resource
import sys
from typing import Any

import torch


def begin_step(device: torch.device) -> None:
    """Forget the peaks of earlier steps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def step_memory(device: torch.device) -> dict[str, Any]:
    """Return the peaks since `begin_step`, in bytes and as shares of the device's memory, JSON-able.

    CUDA: `memory_active_*` is what tensors held, `memory_reserved_*` what the allocator had taken for them;
    `memory_retries` counts allocations that had to empty its cache first, since the process began, and is the sign of a
    memory that is nearly full. CPU: `memory_rss_*` is the resident memory of the process, the peak since it began.
    """
    if device.type == "cuda":
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
    return {"memory_rss_bytes": peak, "memory_rss_share": peak / total}


def memory_words(record: dict[str, Any]) -> str:
    """Say in a few words what `step_memory` put into `record`."""
    kinds = [kind for kind in ("active", "reserved", "rss") if f"memory_{kind}_bytes" in record]
    return ", ".join(
        f"{record[f'memory_{kind}_bytes'] / 2**30:.2f} GiB ({record[f'memory_{kind}_share']:.0%}) {kind}"
        for kind in kinds
    )
