"""The result of a benchmark: its rows, and the columns to print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from quaver.lab.bench.harness import Timing
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.terminal.counts import format_count

Row = dict[str, Any]

Result = dict[str, Any]
"""The rows of a benchmark, its verb, environment and whether it is complete; `BenchOptions.make_result` makes it."""


class UnfinishedError(Exception):
    """An error or Ctrl-C ended a benchmark after its first rows."""

    def __init__(self, result: Result, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.result = result
        """The result with the finished rows."""
        self.cause = cause


def make_contestant_rows(timings: dict[str, Timing]) -> dict[str, Row]:
    """Return a row per contestant ("bfloat16", "quaver RECIPE"), with the ratio of its median to bfloat16's."""
    rows = {}
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        ratio = timing.median_us / timings[BFLOAT16].median_us
        rows[name] = {"library": library, "recipe": recipe, "timing": asdict(timing), "time_over_bfloat16": ratio}
    return rows


def format_title(result: dict[str, Any]) -> str:
    """Return the title of a result's table: machine, versions and commit."""
    machine = result["environment"]
    threads = format_count(machine["threads"], "thread")
    return f"{machine['device']}, {threads}, torch {machine['torch']}, {machine['commit']}"


_COLUMN_TITLES_AND_FORMATS = {
    "spread": ("p10 .. p90", ""),
    "time_over_bfloat16": ("/\nbfloat16", ".2f"),
    "time_over_high_precision": ("/ high\nprecision", ".2f"),
    "torchao_time_over_this": ("torchao\n/ this", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "tflops_per_s": ("TFLOP/s", ".3g"),
    "share_of_peak": ("of\npeak", ".0%"),
    "floor_bytes_per_element": ("floor", "g"),
    "gb_per_s": ("GB/s", ".2f"),
    "share_of_copy": ("of copy", ".0%"),
    "same_codes": ("codes", ""),
    "contestant": ("operands", ""),
    "resident_bytes": ("resident", ",.1f"),
    "peak_bytes": ("peak", ",.1f"),
    "tensor_peak_bytes": ("tensors", ",.1f"),
    "saved_bytes": ("saved", ",.1f"),
    "peak_over_bfloat16": ("peak /\nbfloat16", ".2f"),
    "peak_over_high_precision": ("peak / high\nprecision", ".2f"),
}
"""The titles and formats of fields. Other fields are printed unformatted under their names."""
_TEXTS_FOR_NONE = {
    "torchao_time_over_this": "",
    "same_codes": "",
    "share_of_peak": "",
    "operations": "not counted",
    "kernels": "not counted",
}
"""The text that is printed for None; the default is "unknown"."""


def group_cases(rows: list[Row], fields: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the values of `fields` with the rows that have them."""
    for values, case_rows in groupby(rows, key=lambda row: [str(_add_printed_fields(row)[field]) for field in fields]):
        yield ", ".join(values), list(case_rows)


def format_table(rows: list[Row], fields: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table of `fields`, including the fields that `_add_printed_fields` adds."""
    columns = {field: _COLUMN_TITLES_AND_FORMATS.get(field, (field, "")) for field in fields}
    cells = []
    for row in map(_add_printed_fields, rows):
        values = (
            (row[field], format_spec, _TEXTS_FOR_NONE.get(field, "unknown"))
            for field, (_, format_spec) in columns.items()
        )
        cells.append(
            [unknown if value is None else format(value, format_spec) for value, format_spec, unknown in values]
        )
    return [title for title, _ in columns.values()], cells


def _add_printed_fields(row: Row) -> Row:
    """Return the row with bytes in MiB, and with the median, the spread, the precision and the sizes as text."""
    unit_us, unit = (1.0, "us") if row["timing"]["median_us"] < 1e4 else (1e3, "ms")
    median, low, high = (_format_number(row["timing"][name] / unit_us) for name in ("median_us", "p10_us", "p90_us"))
    printed: Row = {"median": f"{median} {unit}", "spread": f"{low} .. {high}"}
    library, recipe = row.get("library"), row.get("recipe")
    printed["precision"] = row.get("precision") or (
        recipe if library == "quaver" else f"{library} {recipe or ''}".strip()
    )
    printed["M x K x N"] = " x ".join(str(row[size]) for size in "mkn" if size in row)
    printed["same_codes"] = {"True": "same", "False": "others"}.get(str(row.get("same_codes")))
    printed |= {name: size / 2**20 for name, size in row.items() if name.endswith("_bytes") and size is not None}
    return row | printed


def _format_number(value: float) -> str:
    return f"{value:,.1f}" if value < 1e3 else f"{value:,.0f}"
