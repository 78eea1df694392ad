"""The colors of heat maps."""

import matplotlib
from matplotlib.colors import to_hex

COLORMAP = "magma"
"""Lightness changes evenly, for color-blind readers too. The worse end stands out from the page."""

SPECIAL_COLORS = {"light": ("#dfe6ec", "#00a37a", "#0a84ff"), "dark": ("#2b333d", "#00c896", "#4aa8ff")}
"""Colors outside the scale for a best, an infinite and a NaN value, on a light and on a dark page."""


def make_palette(count: int = 32) -> list[str]:
    """Return colors of the scale from dark to light, without its ends, which would look like a page's background."""
    colors = matplotlib.colormaps[COLORMAP]
    return [to_hex(colors(0.06 + 0.9 * index / (count - 1))) for index in range(count)]
