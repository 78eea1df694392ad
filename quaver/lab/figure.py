"""Writes a matplotlib figure as a PNG that does not depend on the user's matplotlibrc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if find_spec("matplotlib") is None:  # a run draws at its end, but must fail at its start
    raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


@contextmanager
def open_figure(image: Path, size: tuple[float, float], *, title: str | None = None) -> Iterator[Figure]:
    """Yield an empty figure of `size` in inches, and write it as a PNG at the end of the block.

    The user's matplotlibrc is ignored, since one that needs LaTeX would end a run here.
    """
    # Imported here, since it takes a tenth of the start of `quaver train`, which draws at its end.
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        if title is not None:
            figure.suptitle(title, fontsize=10, parse_math=False)
        yield figure
        figure.savefig(image, dpi=150, metadata={"Software": None})
