"""Draws ledgers as stacked bars: modeled milliseconds, and bytes outside matmuls and attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quaver.lab.bench.ledger.entries import KERNEL_CATEGORIES, OVERHEAD_CATEGORIES
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.times import sum_milliseconds
from quaver.roofline.device_specs import DeviceSpec

_COLORS = dict(zip(KERNEL_CATEGORIES, matplotlib.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]


def draw_ledgers(ledgers: Sequence[Ledger], spec: DeviceSpec, image: Path) -> None:
    """Write a PNG. Equal ledgers and versions give equal files."""
    with matplotlib.style.context(["default", {"font.size": 9}]):
        make_figure(ledgers, spec).savefig(image, dpi=100, metadata={"Software": None})


def make_figure(ledgers: Sequence[Ledger], spec: DeviceSpec) -> Figure:
    """Make two panels with one bar per ledger."""
    figure = Figure(figsize=(9.5, 1.8 + 0.32 * len(ledgers)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{spec.name}: one compiled forward and backward. Bytes are counted, milliseconds are modeled.")
    left, right = figure.subplots(1, 2, sharey=True)
    times = [sum_milliseconds(ledger, spec) for ledger in ledgers]
    _draw_stack(
        left, ledgers, {name: [categories[name] for categories in times] for name in reversed(KERNEL_CATEGORIES)}
    )
    left.set_xlabel("ms, modeled")
    gigabytes = {name: [ledger.count_bytes(name) / 1e9 for ledger in ledgers] for name in reversed(OVERHEAD_CATEGORIES)}
    _draw_stack(right, ledgers, gigabytes)
    right.set_xlabel("GB outside of matmuls and attention")
    left.invert_yaxis()
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_stack(axis: Any, ledgers: Sequence[Ledger], sizes: dict[str, list[float]]) -> None:
    names = [ledger.name for ledger in ledgers]
    start = [0.0] * len(names)
    for category, values in sizes.items():
        axis.barh(names, values, left=start, color=_COLORS[category], label=category, height=0.7)
        start = [begin + value for begin, value in zip(start, values, strict=True)]
