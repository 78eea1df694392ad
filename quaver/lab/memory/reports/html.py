"""Writes a memory report as one self-contained HTML file: the data, and the scripts and styles in page/."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from quaver.lab.html import PageFiles, write_page
from quaver.lab.recorder.draw import CATEGORY_COLORS, MAX_COLUMNS, reduce_rows

_PAGE_FILES = PageFiles(
    files("quaver.lab.memory.reports") / "page",
    scripts=("words.js", "rows.js", "timeline.js", "icicle.js", "compare.js", "main.js"),
    kind="Memory of a training step",
    footer="1 GiB is 1,024 MiB, or 2<sup>30</sup> bytes. Rest on a number to see it in bytes.",
)
_HIDDEN_KEYS = ("report", "config", "against")
_REPORT_KEYS = ("peak_event", "saved_bytes", "saved_event", "note", "exact", "spans")


def write_html(
    path: Path,
    *,
    title: str,
    prediction: dict[str, Any],
    other: dict[str, Any] | None = None,
    comparison: dict[str, Any] | None = None,
    advice: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
) -> None:
    """Write the page of `prediction` to `path`, and create its folder.

    Args:
        title: plain text.
        prediction: `Prediction.to_dict(timeline=True)`; for a run of the trainer with the keys of `RunMemory.to_dict`.
        other: another run's prediction, whose timeline is drawn on the same scale, with the differences.
        comparison: `Comparison.to_dict()` of both runs.
        advice: `Advice.to_dict()`.
        measured: a measurement of the step in the form of `prediction`. Only its sums are shown.
    Raises:
        ValueError: a report has no "timeline", or a number is not finite.
        OSError: `path` cannot be written.
    """
    labels = comparison or {}
    runs = [_describe_run("prediction", prediction, labels.get("label_a", "this run"))]
    if other is not None:
        runs.append(_describe_run("other", other, labels.get("label_b", "the other run")))
    data = {
        "title": title,
        "colors": CATEGORY_COLORS,
        "runs": runs,
        "comparison": comparison,
        "advice": advice,
        "measured": None if measured is None else _describe(measured),
    }
    write_page(path, _PAGE_FILES, title=title, data=data)


def _describe_run(role: str, prediction: dict[str, Any], label: str) -> dict[str, Any]:
    report = prediction["report"]
    tables = {name: _make_table(report[name]) for name in ("at_peak", "saved_for_backward")}
    return {"label": label, **_describe(prediction), **tables, "timeline": _reduce_timeline(role, report)}


def _describe(prediction: dict[str, Any]) -> dict[str, Any]:
    report = prediction["report"]
    described = {name: value for name, value in prediction.items() if name not in _HIDDEN_KEYS}
    return described | {name: report[name] for name in _REPORT_KEYS} | {"resident": report["resident_bytes"]}


def _reduce_timeline(role: str, report: dict[str, Any]) -> dict[str, Any] | None:
    if "timeline" not in report:
        raise ValueError(f"{role}: expected a report with its timeline, got one without; use to_dict(timeline=True)")
    if not report["timeline"]:
        return None
    names = report["columns"][2:]
    rows = reduce_rows(report["timeline"], MAX_COLUMNS, keep=[report["peak_event"]]).astype("int64")
    series = {name: rows[:, position].tolist() for position, name in enumerate(names, 2) if rows[:, position].any()}
    number = len(report["timeline"])
    return {"number": number, "events": rows[:, 0].tolist(), "series": series}


def _make_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}
