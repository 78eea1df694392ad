"""Draws ledgers as stacked bars: modeled milliseconds, and bytes outside matmuls and attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from quaver.lab.bench.ledger.entries import KERNEL_CATEGORIES, OVERHEAD_CATEGORIES
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.times import sum_milliseconds
from quaver.lab.figure import open_figure
from quaver.roofline.device_specs import DeviceSpec

_COLORS = dict(zip(KERNEL_CATEGORIES, matplotlib.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]


def draw_ledgers(ledgers: Sequence[Ledger], spec: DeviceSpec, image: Path) -> None:
    """Write a PNG of two panels with one bar per ledger. Equal ledgers and versions give equal files."""
    title = f"{spec.name}: one compiled forward and backward. Bytes are counted, milliseconds are modeled."
    with open_figure(image, (9.5, 1.8 + 0.32 * len(ledgers)), title=title) as figure:
        time_axes, byte_axes = figure.subplots(1, 2, sharey=True)
        times = [sum_milliseconds(ledger, spec) for ledger in ledgers]
        _draw_stack(time_axes, ledgers, {name: [ms[name] for ms in times] for name in reversed(KERNEL_CATEGORIES)})
        time_axes.set_xlabel("ms, modeled")
        sizes = {name: [ledger.count_bytes(name) / 1e9 for ledger in ledgers] for name in reversed(OVERHEAD_CATEGORIES)}
        _draw_stack(byte_axes, ledgers, sizes)
        byte_axes.set_xlabel("GB outside of matmuls and attention")
        time_axes.invert_yaxis()
        figure.legend(*time_axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def _draw_stack(axes: Any, ledgers: Sequence[Ledger], values_by_category: dict[str, list[float]]) -> None:
    names = [ledger.name for ledger in ledgers]
    start = [0.0] * len(names)
    for category, values in values_by_category.items():
        axes.barh(names, values, left=start, color=_COLORS[category], label=category, height=0.7)
        start = [begin + value for begin, value in zip(start, values, strict=True)]
