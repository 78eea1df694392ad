"""Console output of commands: lines of text, and tables that fit 80 columns."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from quaver.lab.trainer.display import choose_color_system
from quaver.lab.trainer.tables import fit_table, make_table

__all__ = ["make_table", "show"]


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
