"""Tables of a terminal: text may wrap, and a number is never cut."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.containers import Lines
from rich.table import Column, Table
from rich.text import Text

from quaver.lab.terminal.escape import escape_controls

_UNBROKEN_PART = re.compile(r"(?:^\s+)?(?:[^\s./]|[./](?=\d))*[./]*\s*")
"""A part of a line that is not broken: a word, or a part of a name or path with the separator after it."""
_MIN_BROKEN_COLUMNS = 6
"""Columns in which a part is broken, if the terminal is too narrow for parts."""


class _WrappedText(Text):
    """Text that breaks after words and parts of names, and inside a part only if a line has no room for it."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        """Split `text` into lines, for rich."""
        lines = Lines()
        for line in self.split(allow_blank=True):
            lines.extend(line.divide(_find_breaks(line.plain, width)))
        for line in lines:
            line.rstrip()
        lines.justify(console, width, justify=options.get("justify") or "left", overflow="fold")
        return lines


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
    table = Table(
        title=None if title is None else escape_controls(title),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = [*columns]
    for name in names:
        header, is_wrapped = escape_controls(name), name in wrapped
        table.add_column(
            _WrappedText(header) if is_wrapped else header,
            justify="right" if name in right else "left",
            no_wrap=not is_wrapped,
        )
    for row in rows:
        cells = zip(names, map(escape_controls, row), strict=True)
        table.add_row(*(_WrappedText(cell) if name in wrapped else cell for name, cell in cells))
    return table


def fit_table(table: Table, width: int) -> int:
    """Set the widths of the columns of a table of `make_table`, and return the table's: `width`, or more if needed.

    A table that is too wide has one space between columns instead of two. If that is still too wide, parts of names are
    broken. Columns that do not wrap stay whole, and may make the table wider than `width`.
    """
    for padding, breaks_parts in ((1, False), (0, False), (0, True)):
        min_widths = [_measure_min_width(column, breaks_parts=breaks_parts) for column in table.columns]
        gaps = (1 + padding) * (len(min_widths) - 1) + 2  # and the two edges
        if sum(min_widths) + gaps <= width:
            break
    table.padding = (0, padding, 0, 0)
    widths = [_measure_longest_line(column) for column in table.columns]
    while sum(widths) + gaps > width and widths != min_widths:
        _, widest = max((size, index) for index, size in enumerate(widths) if size > min_widths[index])
        widths[widest] -= 1
    for column, size in zip(table.columns, widths, strict=True):
        column.width = size
    return max(width, sum(widths) + gaps)


def _measure_min_width(column: Column, *, breaks_parts: bool) -> int:
    """Return the least width of a column: its longest line, or part of one if the column is wrapped."""
    longest = _measure_longest_line(column)
    if column.no_wrap:
        return longest
    if breaks_parts:
        return min(longest, _MIN_BROKEN_COLUMNS)
    return max(cell_len(part.rstrip()) for line in _list_lines(column) for part in _UNBROKEN_PART.findall(line))


def _measure_longest_line(column: Column) -> int:
    return max(map(cell_len, _list_lines(column)))


def _list_lines(column: Column) -> list[str]:
    return [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]


def _find_breaks(line: str, width: int) -> list[int]:
    """Return the offsets at which to divide `line` into lines of `width`."""
    breaks = [0]
    for part in _UNBROKEN_PART.finditer(line):
        if cell_len(line[breaks[-1] : part.end()].rstrip()) > width and part.start() > breaks[-1]:
            breaks.append(part.start())
        while cell_len(line[breaks[-1] : part.end()].rstrip()) > width:
            breaks.append(breaks[-1] + max(1, width))
    return breaks[1:]
