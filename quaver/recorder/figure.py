"""A figure that is written as a PNG, alike for every user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@contextmanager
def figure_of(image: Path, size: tuple[float, float], *, title: str | None = None) -> Iterator[Figure]:
    """Give an empty figure of `size` in inches to draw on, and write it as a PNG at the end of the block.

    The user's matplotlibrc has no effect: one that needs LaTeX would end a run here.
    """
    with matplotlib.style.context(["default", {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        if title is not None:
            figure.suptitle(title, fontsize=10, parse_math=False)
        yield figure
        figure.savefig(image, dpi=150)
