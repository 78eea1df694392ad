"""Peak memory of one training step, always labelled with how it was measured.

Every number is `resident + growth`: the twin's own parameters, buffers and optimizer state, and what the step
added at its highest point. So two twins in one process do not count each other. With several ranks, each
measures its own.
"""

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quaver.recorder.storages import TensorBytes
from quaver.trainer.tensors import plain_tensors

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class PeakMemory:
    """Peak bytes of a step, or None with a `source` that says why not; only two `exact` ones can be compared."""

    peak_bytes: int | None = None
    exact: bool = False
    source: str = "not measured"


@contextmanager
def measure_peak(resident: Iterable[Tensor], *, device: torch.device, countable: bool) -> Iterator[PeakMemory]:
    """Measure the block, which runs one training step, and fill in the PeakMemory it was given.

    Args:
        resident: what stays between steps: parameters, buffers, optimizer state.
        device: where they live.
        countable: whether the exact count on CPU sees every tensor. It cannot look into compiled code
            nor into what a DTensor does.
    """
    peak = PeakMemory()
    resident_bytes = storage_bytes(resident)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
        yield peak
        peak.peak_bytes = resident_bytes + torch.cuda.max_memory_allocated(device) - before_bytes
        peak.exact, peak.source = True, "torch.cuda.max_memory_allocated"
    elif countable:
        with TensorBytes() as counted:
            yield peak
        peak.peak_bytes = resident_bytes + counted.peak_bytes
        peak.exact, peak.source = True, "tensors of one step, exact"
    elif (before := _reset_peak_rss()) is not None:
        yield peak
        peak.peak_bytes = resident_bytes + max(0, _status_bytes("VmHWM") - before)
        peak.source = "growth of the process's peak RSS in one step, approximate"
    else:
        yield peak
        peak.source = "not measured: needs a system with glibc and /proc/self/clear_refs, or eager code"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`, of a DTensor those of this rank."""
    plain = [each for tensor in tensors for each in plain_tensors(tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(storages.values())


def _reset_peak_rss() -> int | None:
    """Start a new peak of resident memory and return the bytes resident now; None where neither can be."""
    # Memory that is free but still with the allocator would hide as much growth. glibc gives it back when asked.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is None:
        return None
    malloc_trim(0)
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM to the resident set of now
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {name}")
    return int(found[1]) * 1024
