"""The six places that a cast returns, and how blocks fill them, for the casts of every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Places = tuple[Any, ...]
"""Row codes, their quant_scale and dequant_scale, and the same of columns; cast.py says which may be None."""

NONE = None, None, None
"""The places of a direction that was not asked for."""


def of_blocks(
    cast: Callable[[tuple[int, int]], Places], row: bool, column: bool, dot_products: int, length: int
) -> Places:
    """The six places, of `cast` for each direction that is asked for; square blocks are cast once."""
    if dot_products == length:
        return *cast((length, length)), *NONE
    return *(cast((dot_products, length)) if row else NONE), *(cast((length, dot_products)) if column else NONE)
