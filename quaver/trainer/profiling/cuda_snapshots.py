"""The history of CUDA's allocator, written for https://pytorch.org/memory_viz: the only file that asks torch for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_ENTRIES = 100_000
"""Allocations and releases that are remembered, the newest."""


@contextmanager
def recorded_history(device: torch.device) -> Iterator[None]:
    """Have the allocator remember what it does, and the stacks of who asked, inside the block."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, device=device)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def write_snapshot(file: Path) -> None:
    """Write what the allocator remembers, as a pickle, into a folder that is there. Raises OSError if it cannot."""
    torch.cuda.memory._dump_snapshot(str(file))
