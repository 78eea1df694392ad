"""Console output of commands: lines of text, and tables that fit 80 columns."""

from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from quaver.lab.trainer.display import color_system


def show(views: Iterable[str | Table]) -> None:
    """Print lines unwrapped, and tables in the width of the terminal or 80 columns, whichever is more."""
    width = max(80, Console().width)
    console = Console(width=width, color_system=color_system(), highlight=False, markup=False, emoji=False)
    for view in views:
        console.print(view, soft_wrap=isinstance(view, str))


def make_table(
    title: str | None,
    columns: Iterable[str],
    *,
    rows: Iterable[Iterable[str]],
    wrapped: Collection[str] = (),
    right: Collection[str] = (),
) -> Table:
    """Make a table. Columns named in `wrapped` wrap their text; columns named in `right` are right-aligned."""
    # No lines between columns: a narrow terminal has no room for them.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in wrapped,
            min_width=6 if name in wrapped else None,
            overflow="fold" if name in wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return table
