"""What every benchmark returns and writes: rows, the machine and the versions that they hold for, columns to print."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quaver.bench.harness import Timing
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.trainer.run_folder import git_revision

BFLOAT16 = "bfloat16"
"""The contestant that all ratios are to."""

Row = dict[str, Any]

Result = dict[str, Any]
"""See `options.DeviceOptions.result`."""


def contestant_rows(timings: dict[str, Timing]) -> dict[str, Row]:
    """By contestant ("bfloat16", "quaver RECIPE"): library, recipe, timing and the ratio of medians to bfloat16's."""
    rows = {}
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        ratio = timing.median_us / timings[BFLOAT16].median_us
        rows[name] = {"library": library, "recipe": recipe, "timing": asdict(timing), "time_over_bfloat16": ratio}
    return rows


def title_of(result: dict[str, Any]) -> str:
    """The machine, versions and commit of a result, as the title of its table."""
    about = result["environment"]
    return f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {about['commit']}"


class Column(NamedTuple):
    """How a field of a row is printed."""

    title: str
    form: str = ""
    """The format of the value, such as ".2f"."""
    unknown: str = "unknown"
    """The text of None."""
    value: Callable[[Row], Any] | None = None
    """Computes the value from the row; None for the field itself."""

    def text(self, field: str, row: Row) -> str:
        """The text of the field in a row."""
        value = row[field] if self.value is None else self.value(row)
        return self.unknown if value is None else format(value, self.form)


def _mebibytes(title: str, field: str) -> Column:
    return Column(title, ",.1f", value=lambda row: None if row[field] is None else row[field] / 2**20)


def _duration(us: float) -> str:
    return f"{us:,.1f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms"


_COLUMNS = {
    "contestant_name": Column("precision", value=lambda row: f"{row['library']} {row['recipe']}".strip()),
    "median": Column("median", value=lambda row: _duration(row["timing"]["median_us"])),
    "spread": Column("p10 .. p90", value=lambda row: " .. ".join(_duration(row["timing"][p]) for p in _SPREAD)),
    "time_over_bfloat16": Column("/ bfloat16", ".2f"),
    "time_over_high_precision": Column("/ high precision", ".2f"),
    "torchao_time_over_this": Column("torchao / this", ".2f", unknown=""),
    "tokens_per_s": Column("tokens/s", ",.0f"),
    "tflops_per_s": Column("TFLOP/s", ".3g"),
    "share_of_peak": Column("of peak", ".0%"),
    "floor_bytes_per_element": Column("B/element, floor", "g"),
    "gb_per_s": Column("GB/s", ".2f"),
    "share_of_copy": Column("of copy", ".0%"),
    "same_codes": Column("codes", value=lambda row: {None: "", True: "same", False: "others"}[row["same_codes"]]),
    "sizes": Column("M x K x N", value=lambda row: f"{row['m']} x {row['k']} x {row['n']}"),
    "contestant": Column("operands"),
    "operations": Column("operations", unknown="not counted"),
    "kernels": Column("kernels", unknown="not counted"),
    "resident_bytes": _mebibytes("resident", "resident_bytes"),
    "peak_bytes": _mebibytes("peak", "peak_bytes"),
    "tensor_peak_bytes": _mebibytes("tensors", "tensor_peak_bytes"),
    "kept_bytes": _mebibytes("saved", "kept_bytes"),
    "peak_over_bfloat16": Column("peak / bfloat16", ".2f"),
    "peak_over_high_precision": Column("peak / high precision", ".2f"),
}
"""By field; a field that is not here is printed as it is, under its own name."""
_SPREAD = ("p10_us", "p90_us")


def table_of(rows: list[Row], fields: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The titles and the cells of a table of these fields of rows."""
    columns = {field: _COLUMNS.get(field, Column(field)) for field in fields}
    cells = [[column.text(field, row) for field, column in columns.items()] for row in rows]
    return [column.title for column in columns.values()], cells


def environment(device: torch.device) -> dict[str, Any]:
    """The provenance of a result: hardware, versions, commit, command, date."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda, "hip": torch.version.hip} if is_cuda else {}),
        "commit": _commit(),
        "command": "quaver " + shlex.join(sys.argv[1:]),
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    features = torch.backends.cpu.get_cpu_capability()
    units = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    if not has_bfloat16_units("cpu"):
        units = " without bfloat16 instructions"
    return f"{platform.machine()} CPU, {features}{units}"


def _commit() -> str:
    """The commit of quaver's checkout, with "+" where files differ from it."""
    revision = git_revision(Path(__file__).parent)
    return "unknown" if revision is None else revision["commit"][:7] + ("+" if revision["is_modified"] else "")


def writable(path: Path, option: str = "--output") -> Path:
    """Return `path` after checking that it can be written, so that a measurement is not lost at its end.

    Args:
        option: the setting that gave the path, for the error.
    Raises:
        ValueError: it cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{option}: expected a file to write, got the folder {path}")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror}") from error
    return path


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n")
