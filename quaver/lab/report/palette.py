"""The colors of heat maps."""

import matplotlib
from matplotlib.colors import to_hex

PALETTE = "magma"
"""Even in lightness, for colour-blind readers too; the end that stands out from the page is the worse one."""

SPECIAL = {"light": ("#dfe6ec", "#00a37a", "#0a84ff"), "dark": ("#2b333d", "#00c896", "#4aa8ff")}
"""On a light and on a dark page: the best value, an infinite one, one that is not a number. No color of the scale."""


def palette(number: int = 32) -> list[str]:
    """Colors of the scale from dark to light, without the very ends, which would look like a page's ground."""
    colors = matplotlib.colormaps[PALETTE]
    return [to_hex(colors(0.06 + 0.9 * at / (number - 1))) for at in range(number)]
