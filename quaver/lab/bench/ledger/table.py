"""Formats ledgers as rows of text: one precision or one kernel a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quaver.lab.bench.ledger.entries import OVERHEAD_CATEGORIES
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.times import predict_entry_seconds, sum_milliseconds
from quaver.roofline.device_specs import DeviceSpec

LEDGER_COLUMNS = (
    "precision",
    "laun-\nches",
    "amax\nGB",
    "casts\nGB",
    "copies\nGB",
    "hp\nGB",
    "sum\nGB",
    "saved\nMB",
    "model\nms",
    "speed",
)
KERNEL_COLUMNS = ("category", "pass", "us", "MB", "kernel and its line", "fuses")
_MAX_FUSED_OPERATORS = 8
"""Fused operators of a kernel that are shown."""


def iter_ledger_rows(ledgers: Sequence[Ledger], spec: DeviceSpec) -> Iterator[list[str]]:
    """Yield one row per precision, with speeds relative to the first."""
    base = sum(sum_milliseconds(ledgers[0], spec).values())
    for ledger in ledgers:
        total = sum(sum_milliseconds(ledger, spec).values())
        cells = [ledger.name.removeprefix("quaver "), str(ledger.num_launches)]
        cells += [_format_gigabytes(ledger.count_bytes(category)) for category in OVERHEAD_CATEGORIES]
        if ledger.num_copies:
            cells[2 + OVERHEAD_CATEGORIES.index("copies")] += f" ({ledger.num_copies})"
        cells += [_format_gigabytes(ledger.overhead_bytes), f"{ledger.saved_bytes / 1e6:,.0f}", f"{total:.1f}"]
        yield [*cells, f"{base / total:.2f}"]


def iter_kernel_rows(ledger: Ledger, spec: DeviceSpec) -> Iterator[list[str]]:
    """Yield one row per entry, the slowest first."""
    for entry in sorted(ledger.entries, key=lambda entry: -predict_entry_seconds(entry, spec)):
        again = f" + {entry.reread_bytes / 1e6:,.0f} again" if entry.reread_bytes else ""
        again += f"\n{entry.cached_bytes / 1e6:,.0f} cached" if entry.cached_bytes >= 1e5 else ""
        fused = entry.fuses[:_MAX_FUSED_OPERATORS] + (("...",) if len(entry.fuses) > _MAX_FUSED_OPERATORS else ())
        yield [
            entry.category,
            "backward" if entry.is_backward else "forward",
            f"{1e6 * predict_entry_seconds(entry, spec):,.1f}",
            f"{(entry.moved_bytes - entry.reread_bytes) / 1e6:,.1f}{again}",
            f"{entry.name}\n{entry.location}",
            " ".join(fused),
        ]


def iter_findings(ledger: Ledger) -> Iterator[str]:
    """Yield sentences about redundant reads, stores and computations of a recipe."""
    reads = ledger.quantization_reads
    if reads:
        times = sorted(reads.values())
        yield f"{ledger.name}: reads {len(reads)} tensors to quantize them, {times[0]} to {times[-1]} times each"
    if ledger.num_strided_copies:
        yield f"{ledger.name}: copies codes by aten's strided copy of bytes {ledger.num_strided_copies} times"
    if ledger.num_surplus_stores:
        yield f"{ledger.name}: stores codes {ledger.num_surplus_stores} times in a layout that is stored already"
    if ledger.float64_per_element >= 1:
        yield f"{ledger.name}: computes up to {ledger.float64_per_element:.1f} float64 operations an element"
    if ledger.float32_bytes > ledger.overhead_bytes / 100:
        yield f"{ledger.name}: writes {_format_gigabytes(ledger.float32_bytes)} GB of float32 intermediates"


def _format_gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}" if count >= 5e7 else f"{count / 1e9:.3f}" if count else ""
