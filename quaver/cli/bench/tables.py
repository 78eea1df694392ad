"""The tables that benchmarks print: columns, how numbers are written, and the end of every benchmark."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from quaver.bench.results import save
from quaver.cli.bench.options import Surroundings
from quaver.cli.errors import EXIT_INTERRUPTED

_MILLISECONDS_FROM_US = 1e4

Column = tuple[str, Callable[[dict[str, Any]], str]]
"""A column's name and how a row's text comes from the row."""


def finish(surroundings: Surroundings, result: dict[str, Any], columns: list[Column], *notes: str) -> int:
    """Save a result, print it as a table with notes below, and say where it was saved; 0, or 130 if Ctrl-C ended it."""
    save(result, surroundings.output)
    about = result["environment"]
    table = Table(title=f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {about['commit']}")
    for name, _ in columns:
        table.add_column(name, no_wrap=True)
    for row in result["rows"]:
        table.add_row(*(text(row) for _, text in columns))
    surroundings.console.print(table)
    for note in notes:
        surroundings.report(note)
    surroundings.report(f"saved {surroundings.output}" + ("" if result["complete"] else ": interrupted, not complete"))
    return 0 if result["complete"] else EXIT_INTERRUPTED


def field(name: str) -> Callable[[dict[str, Any]], str]:
    """The text of a row's field as it is."""
    return lambda row: str(row[name])


def number(name: str, form: str, *, unknown: str = "unknown") -> Callable[[dict[str, Any]], str]:
    """The text of a row's number in a format such as ".2f"; `unknown` where it is None."""
    return lambda row: unknown if row[name] is None else format(row[name], form)


def mebibytes(name: str) -> Callable[[dict[str, Any]], str]:
    """The text of a row's bytes, in MiB; "unknown" for None."""
    return lambda row: "unknown" if row[name] is None else f"{row[name] / 2**20:,.1f}"


def median(row: dict[str, Any]) -> str:
    """The median of a row's `timing`."""
    return _duration(row["timing"]["median_us"])


def spread(row: dict[str, Any]) -> str:
    """The 10th and 90th percentile of a row's `timing`."""
    return f"{_duration(row['timing']['p10_us'])} .. {_duration(row['timing']['p90_us'])}"


def _duration(us: float) -> str:
    return f"{us:,.1f} us" if us < _MILLISECONDS_FROM_US else f"{us / 1e3:,.1f} ms"


def precision(row: dict[str, Any]) -> str:
    """The library and recipe of a row."""
    return f"{row['library']} {row['recipe']}".strip()


TIMES: list[Column] = [("median", median), ("p10 .. p90", spread)]
