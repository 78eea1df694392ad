"""What commands print with: a wide console, and tables."""

from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console
from rich.table import Table


def wide_console(columns: int) -> Console:
    """A console of at least this many columns that prints text as it is: brackets and numbers get no style."""
    return Console(width=max(columns, Console().width), highlight=False, markup=False, emoji=False)


def make_table(
    title: str | None,
    columns: Iterable[str],
    *,
    rows: Iterable[Iterable[str]],
    wrapped: Collection[str] = (),
    right: Collection[str] = (),
) -> Table:
    """A table of these columns; those of `wrapped` break their lines, those of `right` are aligned to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD)  # leaves most columns of a narrow terminal to the text
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in wrapped,
            overflow="fold" if name in wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return table
