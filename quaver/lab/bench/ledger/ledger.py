"""The ledger of one module in one precision: its entries and their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quaver.lab.bench.ledger.entries import KERNEL_CATEGORIES, OVERHEAD_CATEGORIES, LedgerEntry
from quaver.lab.bench.ledger.launches import BufferAccess, CompiledGraph


@dataclass(frozen=True)
class Ledger:
    """The launches of one compiled module, forward and backward.

    `name` is "bfloat16", "quaver RECIPE" or "torchao RECIPE"; `gpu` is the name of a device spec.
    """

    name: str
    gpu: str
    entries: tuple[LedgerEntry, ...]
    graphs: tuple[CompiledGraph, ...]

    @property
    def num_launches(self) -> int:
        """The number of launched kernels."""
        return sum(entry.num_launches for entry in self.entries)

    def count_bytes(self, *categories: str) -> int:
        """Return the bytes that entries of these categories read and write."""
        return sum(entry.moved_bytes for entry in self.select(*categories))

    def select(self, *categories: str) -> list[LedgerEntry]:
        """Return the entries of these categories."""
        return [entry for entry in self.entries if entry.category in categories]

    @property
    def overhead_bytes(self) -> int:
        """Bytes of launches that are neither matmuls nor attention."""
        return self.count_bytes(*OVERHEAD_CATEGORIES)

    @property
    def num_copies(self) -> int:
        """The number of copies of codes into another layout."""
        return len(self.select("copies"))

    @property
    def num_strided_copies(self) -> int:
        """The number of copies by aten's strided copy of bytes, which is slow."""
        return sum(1 for entry in self.entries if entry.strided_elements)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for backward, without parameters and buffers."""
        return sum(tensor.moved_bytes for graph in self.graphs for tensor in graph.saved)

    @property
    def quantization_reads(self) -> Counter[str]:
        """The number of launches that read a high-precision tensor for an amax or for codes, by tensor."""
        return Counter(
            f"{'backward' if entry.is_backward else 'forward'} {access.name} {list(access.size)}"
            for entry in self.select("amax", "casts")
            for access in entry.launch.reads
            if access.dtype in _HIGH_PRECISION_DTYPES and access.elements >= self._count_quantized(entry)
        )

    @staticmethod
    def _count_quantized(entry: LedgerEntry) -> int:
        """Return the number of elements that a launch quantizes: of its codes, or of its largest operand."""
        accesses = (*entry.launch.reads, *entry.launch.writes)
        largest = max(access.elements for access in accesses)
        return max((access.elements for access in accesses if access.is_float8), default=largest)

    @property
    def stores(self) -> dict[str, list[BufferAccess]]:
        """The buffers that store the codes of each conversion, copies included."""
        buffers: dict[str, list[BufferAccess]] = {}
        conversions: dict[str, str] = {}
        for entry in self.entries:
            side = "backward" if entry.is_backward else "forward"
            launch = entry.launch
            for access in launch.writes:
                if access.is_float8 and entry.category in ("casts", "copies") and not entry.flops:
                    source = launch.reads[0].name if entry.category == "copies" else ""
                    conversion = conversions.get(source) or f"{side} {launch.conversions.get(access.name, access.name)}"
                    conversions[access.name] = conversion
                    buffers.setdefault(conversion, []).append(access)
        return buffers

    @property
    def num_surplus_stores(self) -> int:
        """The number of redundant stores: the same codes are written twice in one layout."""
        return sum(len(buffers) - len({access.stride for access in buffers}) for buffers in self.stores.values())

    @property
    def float32_bytes(self) -> int:
        """Bytes of written float32 intermediates that are as large as an activation."""
        return sum(
            access.moved_bytes
            for entry in self.select(*OVERHEAD_CATEGORIES)
            for access in entry.launch.writes
            if access.dtype is torch.float32
        )

    @property
    def float64_per_element(self) -> float:
        """The largest number of float64 operations that a kernel spends per element."""
        ratios = [
            entry.float64_operations / max(access.elements for access in (*entry.launch.reads, *entry.launch.writes))
            for entry in self.select(*OVERHEAD_CATEGORIES)
        ]
        return max(ratios, default=0.0)

    def list_counts(self) -> dict[str, Any]:
        """Return the numbers that tests compare."""
        return {
            "launches": self.num_launches,
            "copies": self.num_copies,
            "strided_copies": self.num_strided_copies,
            **{f"{category}_bytes": self.count_bytes(category) for category in OVERHEAD_CATEGORIES},
            "saved_bytes": self.saved_bytes,
            "surplus_stores": self.num_surplus_stores,
            "float64_per_element": round(self.float64_per_element, 2),
        }

    def to_json(self, *, kernels: bool) -> dict[str, Any]:
        """Return sums and the names of Inductor's kernels by category, and with `kernels` all entries."""
        categories = {
            category: {
                "launches": sum(entry.num_launches for entry in self.select(category)),
                "read_bytes": sum(entry.read_bytes for entry in self.select(category)),
                "written_bytes": sum(entry.written_bytes for entry in self.select(category)),
                "kernels": sorted({kernel.name for entry in self.select(category) for kernel in entry.launch.kernels}),
            }
            for category in KERNEL_CATEGORIES
        }
        result = {
            "name": self.name,
            "gpu": self.gpu,
            **self.list_counts(),
            "overhead_bytes": self.overhead_bytes,
            "reread_bytes": sum(entry.reread_bytes for entry in self.entries),
            "cached_bytes": sum(entry.cached_bytes for entry in self.entries),
            "float32_bytes": self.float32_bytes,
            "categories": categories,
            "quantization_reads": dict(self.quantization_reads.most_common()),
            "stores": {name: len(buffers) for name, buffers in self.stores.items()},
        }
        return result | ({"kernels": [_make_row(entry) for entry in self.entries]} if kernels else {})


_HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _make_row(entry: LedgerEntry) -> dict[str, Any]:
    row = {name: getattr(entry, name) for name in LedgerEntry.__dataclass_fields__ if name != "launch"}
    accesses = {"reads": _list_accesses(entry.launch.reads), "writes": _list_accesses(entry.launch.writes)}
    return {"launches": row.pop("num_launches"), **row, **accesses}


def _list_accesses(accesses: Iterable[BufferAccess]) -> list[dict[str, Any]]:
    return [{**asdict(access), "dtype": str(access.dtype).removeprefix("torch.")} for access in accesses]
