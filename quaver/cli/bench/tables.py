"""The table that a benchmark prints, and the end of every benchmark."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quaver.bench.results import Row, save, title_of
from quaver.cli.bench.options import WIDTH, BenchOptions
from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import EXIT_INTERRUPTED

_MILLISECONDS_FROM_US = 1e4


class Column(NamedTuple):
    """A column of a table of rows."""

    title: str
    value: str | Callable[[Row], Any]
    """The field of a row, or what computes the value from the row."""
    form: str = ""
    """The format of the value, such as ".2f"."""
    unknown: str = "unknown"
    """The text of None."""

    def text(self, row: Row) -> str:
        """The text of the column in a row."""
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        return self.unknown if value is None else format(value, self.form)


def finish(options: BenchOptions, result: dict[str, Any], columns: list[Column], *notes: str) -> int:
    """Save a result, print it as a table with notes below, and say where it was saved; 0, or 130 if Ctrl-C ended it."""
    save(result, options.output_file)
    rows = [[column.text(row) for column in columns] for row in result["rows"]]
    console = wide_console(WIDTH)
    console.print(make_table(title_of(result), [column.title for column in columns], rows=rows))
    for note in notes:
        console.print(note)
    console.print(f"saved {options.output_file}" + ("" if result["complete"] else ": interrupted, not complete"))
    return 0 if result["complete"] else EXIT_INTERRUPTED


def mebibytes(title: str, name: str) -> Column:
    """A column of the bytes in a field, in MiB."""
    return Column(title, lambda row: None if row[name] is None else row[name] / 2**20, ",.1f")


def _duration(us: float) -> str:
    return f"{us:,.1f} us" if us < _MILLISECONDS_FROM_US else f"{us / 1e3:,.1f} ms"


def _spread(row: Row) -> str:
    return f"{_duration(row['timing']['p10_us'])} .. {_duration(row['timing']['p90_us'])}"


PRECISION = Column("precision", lambda row: f"{row['library']} {row['recipe']}".strip())

TIMES = (Column("median", lambda row: _duration(row["timing"]["median_us"])), Column("p10 .. p90", _spread))
