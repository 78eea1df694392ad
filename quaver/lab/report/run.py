"""Reads the data of a report: a run's folder, or a single record of numerics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT, read_json
from quaver.lab.report.alarms import read_alarms
from quaver.lab.runs.file_names import CONVERSION_FILE, METRICS_FILE, NUMERICS_FILE, PROVENANCE_FILE, SUMMARY_FILE
from quaver.lab.runs.json_lines import has_incomplete_last_line, read_json_lines
from quaver.lab.runs.provenance import RunStart, read_starts
from quaver.lab.runs.status import RunSummary, read_summary
from quaver.numerics.record import Record
from quaver.runtime.errors import InputError

_MAX_NAMED_RUNS = 3
_REPORTED_FILES = (METRICS_FILE, NUMERICS_FILE, CONVERSION_FILE, PROVENANCE_FILE, SUMMARY_FILE)


class ConvertedLayer(TypedDict):
    """A matmul weight of conversion_report.json."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: str
    in_features: int
    out_features: int
    converted: bool
    reason: str
    matrices_per_token: NotRequired[float]
    backend: NotRequired[str]


class Conversion(TypedDict):
    """conversion_report.json: `ConversionReport.to_dict()`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    config: str
    layers: list[ConvertedLayer]
    notes: list[str]
    float8_flops_fraction: float


_CONVERSION_ADAPTER = TypeAdapter(Conversion)


@dataclass(frozen=True)
class RunData:
    """The records in the folder of a run."""

    label: str
    """The name of its folder."""
    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl."""
    numerics: Record | None = None
    """numerics.jsonl, or None without statistics."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """The alarms of `numerics`, from `read_alarms`."""
    conversion: Conversion | None = None
    """conversion_report.json, or None if it was not written."""
    starts: list[RunStart] = field(default_factory=list)
    """The lines of provenance.jsonl, one per start of the run."""
    summary: RunSummary | None = None
    """How the last start ended; None while the run goes on, after it was killed, and for a record alone."""

    torn_files: list[str] = field(default_factory=list)
    """The names of the files of JSON lines whose last line is incomplete."""

    @property
    def notes(self) -> list[str]:
        """Warnings about the files of the run."""
        return [
            f"the last line of {name} was incomplete, as a killed run leaves it, and is left out"
            for name in self.torn_files
        ]

    @property
    def models(self) -> list[str]:
        """The names of the models in metrics.jsonl, the float8 model first."""
        return list(dict.fromkeys(str(record["model"]) for record in self.records if "model" in record))


def read_runs(paths: list[Path]) -> list[RunData]:
    """Read runs. Runs whose folders have the same name are labeled by their paths.

    Raises:
        OSError: a run or a file cannot be read.
        InputError: a path is not a run, or a file is damaged or of another version; one line.
    """
    names = [path.resolve().name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [_read(path, label) for path, label in zip(paths, labels, strict=True)]


def _read(path: Path, label: str) -> RunData:
    if not path.exists():
        raise FileNotFoundError(f"there is no run {str(path)!r}: expected the folder of a run, or a record of numerics")
    metrics, numerics, conversion, provenance, summary = (path / name for name in _REPORTED_FILES)
    if path.is_file():
        return RunData(label, path, torn_files=_list_torn_files([path]), **_read_numerics(path))
    if not metrics.is_file() and not numerics.is_file():
        raise InputError(
            f"{str(path)!r} is not the folder of a run: it has neither {metrics.name} nor {numerics.name}"
            + _name_runs_in(path)
        )
    for file in (numerics, metrics, conversion, provenance, summary):
        if file.exists() and not file.is_file():  # reading a FIFO would block
            raise InputError(f"{str(file)!r} is not a file; remove it")
    records = read_json_lines(metrics) if metrics.exists() else []
    return RunData(
        label,
        path,
        records=records,
        conversion=read_json(conversion, _CONVERSION_ADAPTER, "remove the file") if conversion.exists() else None,
        starts=read_starts(provenance) if provenance.exists() else [],
        summary=read_summary(summary),
        torn_files=_list_torn_files([metrics, numerics, provenance]),
        **(_read_numerics(numerics) if numerics.exists() else {}),
    )


def _name_runs_in(folder: Path) -> str:
    """Return the part of an error that names the runs in a folder; "" if it has none or cannot be listed."""
    files = (path for name in _REPORTED_FILES[:2] for path in folder.glob(f"*/{name}"))
    runs = sorted({str(file.parent) for file in files})
    more = f" and {len(runs) - _MAX_NAMED_RUNS:,} more" if len(runs) > _MAX_NAMED_RUNS else ""
    return f"; it has runs in it: {', '.join(map(repr, runs[:_MAX_NAMED_RUNS]))}{more}" if runs else ""


def _read_numerics(path: Path) -> dict[str, Any]:
    record = Record.read(path)
    return {"numerics": record, "alarms": read_alarms(record, repr(str(path)))}


def _list_torn_files(paths: list[Path]) -> list[str]:
    return [path.name for path in paths if path.is_file() and has_incomplete_last_line(path)]
