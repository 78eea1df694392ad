"""Tables of `quaver memory`: what would lower the peak, and what was predicted beside what was measured."""

from typing import Any

from rich.table import Table

from quaver.memory.runs.advise import Advice, Row
from quaver.recorder.byte_sizes import unit_of


def advice_table(advice: Advice) -> Table:
    """The settings that were tried, in that order; the best one is marked by a star."""
    table = Table(title="What changing a setting would do to the peak")
    table.add_column("")
    table.add_column("setting", overflow="fold")
    for column in ("peak", "difference", "computed again", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    if advice.fit_bytes is not None:
        table.add_column("fits")
    table.add_column("how, or why not", overflow="fold")
    for index, row in enumerate(advice.rows):
        fits = [] if advice.fit_bytes is None else [{True: "yes", False: "no", None: ""}[row.fits]]
        table.add_row("*" if index == advice.best else "", row.change, *_numbers(row), *fits, row.note)
    return table


def advice_summary(advice: Advice) -> list[str]:
    """Lines that say what to do: the flags of the best setting, or what comes nearest; then the notes."""
    lines = []
    if advice.fit_bytes is not None:
        size = _size(advice.fit_bytes)
        if advice.best is not None:
            lines.append(f"fastest that fits {size}: {_setting(advice.rows[advice.best])}")
        elif advice.nearest is not None:
            lines.append(f"nothing that was tried fits {size}; nearest: {_setting(advice.rows[advice.nearest])}")
    notes = advice.notes if advice.device is None else [*advice.notes, f"times are modelled for {advice.device}"]
    return lines + notes


def side_by_side_table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `quaver.memory.runs.measure.side_by_side`; what was not measured stays empty."""
    table = Table(title="Predicted and measured, at the peak")
    table.add_column("what")
    for column in ("predicted bytes", "measured bytes", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        measured, ratio = row["measured_bytes"], row["ratio"]
        words = ("" if measured is None else f"{measured:,}", "" if ratio is None else f"{ratio:.4f}")
        table.add_row(row["what"], f"{row['predicted_bytes']:,}", *words)
    return table


def _setting(row: Row) -> str:
    peak = "" if row.peak_bytes is None else f", {_size(row.peak_bytes)}"
    return f"{row.change}{peak}" + (f": {row.words}" if row.words else "")


def _numbers(row: Row) -> tuple[str, str, str, str]:
    peak = "" if row.peak_bytes is None else _size(row.peak_bytes)
    difference = (
        ""
        if not row.difference_bytes
        else f"{'+' if row.difference_bytes > 0 else '-'}{_size(abs(row.difference_bytes))}"
    )
    cost = row.cost
    again = "" if cost is None or cost.recomputed_flops is None else f"{cost.recomputed_flops / cost.flops:.1%}"
    step = "" if cost is None or cost.modelled_s is None else f"{cost.modelled_s:.3g} s"
    return peak, difference, again, step


def _size(size_bytes: int) -> str:
    unit_bytes, unit = unit_of(size_bytes)
    return f"{size_bytes / unit_bytes:.4g} {unit}"
