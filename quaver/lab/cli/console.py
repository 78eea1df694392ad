"""Console output of commands: lines of text, tables that fit 80 columns, and JSON."""

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from quaver.lab.trainer.display import choose_color_system
from quaver.lab.trainer.tables import fit_table, make_table

__all__ = ["make_table", "show", "show_or_dump"]


def show(views: Iterable[str | Table]) -> None:
    """Print lines unwrapped, and tables in the width of the terminal or 80 columns, whichever is more.

    A table whose numbers need more is wider: no number is cut.
    """
    width = max(80, Console().width)
    console = Console(width=width, color_system=choose_color_system(), highlight=False, markup=False, emoji=False)
    for view in views:
        if isinstance(view, Table):
            console.width = fit_table(view, width)
        console.print(view, soft_wrap=isinstance(view, str))


def show_or_dump(views: Iterable[str | Table], content: dict[str, Any], *, as_json: bool) -> None:
    """`show` the views, or print the content as JSON."""
    if as_json:
        print(json.dumps(content, indent=2, allow_nan=False))
    else:
        show(views)
