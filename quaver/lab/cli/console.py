"""Console output of commands: lines, and tables that fit 80 columns."""

from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from quaver.lab.trainer.display import color_system


def show(views: Iterable[str | Table]) -> None:
    """Print lines as they are, and tables on the width of the terminal, but on at least 80 columns.

    Brackets and numbers get no style, and under NO_COLOR nothing does.
    """
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
    """A table of these columns; those of `wrapped` break their lines, those of `right` are aligned to the right."""
    # Lines between columns would take columns of a narrow terminal from the text.
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
