"""Sums over the entries of one subject in one precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quaver.lab.bench.ledger.entries import CATEGORIES, OVERHEAD, LedgerEntry
from quaver.lab.memory.compiling.launches import Access, CompiledGraph


@dataclass(frozen=True)
class Ledger:
    """The launches of one compiled subject, forward and backward.

    `name` is "bfloat16", "quaver RECIPE" or "torchao RECIPE"; `gpu` that of a device spec.
    """

    name: str
    gpu: str
    entries: tuple[LedgerEntry, ...]
    graphs: tuple[CompiledGraph, ...]

    @property
    def launches(self) -> int:
        """Kernels that start."""
        return sum(entry.launches for entry in self.entries)

    def bytes_of(self, *categories: str) -> int:
        """Return bytes read and written by entries of these categories."""
        return sum(entry.moved_bytes for entry in self.of(*categories))

    def of(self, *categories: str) -> list[LedgerEntry]:
        """Return the entries of these categories."""
        return [entry for entry in self.entries if entry.category in categories]

    @property
    def overhead_bytes(self) -> int:
        """Bytes outside of matmuls and attention."""
        return self.bytes_of(*OVERHEAD)

    @property
    def copies(self) -> int:
        """Copies of codes into another layout."""
        return len(self.of("copies"))

    @property
    def strided_copies(self) -> int:
        """Copies of codes by aten's strided copy of bytes, which is slow."""
        return sum(1 for entry in self.entries if entry.strided_elements)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for backward, but for parameters and buffers."""
        return sum(each.moved_bytes for graph in self.graphs for each in graph.saved)

    @property
    def quantization_reads(self) -> Counter[str]:
        """By tensor in high precision, how many launches read it to quantize it: for an amax or for codes."""
        return Counter(
            f"{'backward' if entry.is_backward else 'forward'} {each.name} {list(each.size)}"
            for entry in self.of("amax", "casts")
            for each in entry.launch.reads
            if each.dtype in _HIGH_PRECISION and each.elements >= self._smallest(entry)
        )

    @staticmethod
    def _smallest(entry: LedgerEntry) -> int:
        """Return the elements of the tensor that a launch quantizes: as many as its codes, or as its largest operand has."""
        accesses = (*entry.launch.reads, *entry.launch.writes)
        return max((each.elements for each in accesses if each.is_float8), default=max(e.elements for e in accesses))

    @property
    def stores(self) -> dict[str, list[Access]]:
        """By conversion to float8, the buffers in which its codes are stored, copies of them included."""
        found: dict[str, list[Access]] = {}
        of_buffer: dict[str, str] = {}
        for entry in self.entries:
            side = "backward" if entry.is_backward else "forward"
            launch = entry.launch
            for access in launch.writes:
                if access.is_float8 and entry.category in ("casts", "copies") and not entry.flops:
                    source = launch.reads[0].name if entry.category == "copies" else ""
                    conversion = of_buffer.get(source) or f"{side} {launch.conversions.get(access.name, access.name)}"
                    of_buffer[access.name] = conversion
                    found.setdefault(conversion, []).append(access)
        return found

    @property
    def surplus_stores(self) -> int:
        """Stores of codes in a layout in which the same conversion's codes are stored already."""
        return sum(len(each) - len({access.stride for access in each}) for each in self.stores.values())

    @property
    def float32_bytes(self) -> int:
        """Bytes of float32 intermediates, as large as an activation, that are written."""
        return sum(
            each.moved_bytes
            for entry in self.of(*OVERHEAD)
            for each in entry.launch.writes
            if each.dtype is torch.float32
        )

    @property
    def float64_per_element(self) -> float:
        """The most float64 operations that a kernel spends on an element that it reads or writes."""
        ratios = [
            entry.float64_operations / max(each.elements for each in (*entry.launch.reads, *entry.launch.writes))
            for entry in self.of(*OVERHEAD)
        ]
        return max(ratios, default=0.0)

    def counts(self) -> dict[str, Any]:
        """Return the numbers that tests hold."""
        return {
            "launches": self.launches,
            "copies": self.copies,
            "strided_copies": self.strided_copies,
            **{f"{category}_bytes": self.bytes_of(category) for category in OVERHEAD},
            "saved_bytes": self.saved_bytes,
            "surplus_stores": self.surplus_stores,
            "float64_per_element": round(self.float64_per_element, 2),
        }

    def to_json(self, *, kernels: bool) -> dict[str, Any]:
        """Sums, the names of Inductor's kernels in each category, and with `kernels` all entries."""
        categories = {
            category: {
                "launches": sum(entry.launches for entry in self.of(category)),
                "read_bytes": sum(entry.read_bytes for entry in self.of(category)),
                "written_bytes": sum(entry.written_bytes for entry in self.of(category)),
                "kernels": sorted({each.name for entry in self.of(category) for each in entry.launch.kernels}),
            }
            for category in CATEGORIES
        }
        found = {
            "name": self.name,
            "gpu": self.gpu,
            **self.counts(),
            "overhead_bytes": self.overhead_bytes,
            "read_again_bytes": sum(entry.again_bytes for entry in self.entries),
            "cached_bytes": sum(entry.cached_bytes for entry in self.entries),
            "float32_bytes": self.float32_bytes,
            "categories": categories,
            "quantization_reads": dict(self.quantization_reads.most_common()),
            "stores": {name: len(each) for name, each in self.stores.items()},
        }
        return found | ({"kernels": [_row(entry) for entry in self.entries]} if kernels else {})


_HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


def _row(entry: LedgerEntry) -> dict[str, Any]:
    row = {name: getattr(entry, name) for name in LedgerEntry.__dataclass_fields__ if name != "launch"}
    return row | {"reads": _accesses(entry.launch.reads), "writes": _accesses(entry.launch.writes)}


def _accesses(accesses: Iterable[Access]) -> list[dict[str, Any]]:
    return [{**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for each in accesses]
