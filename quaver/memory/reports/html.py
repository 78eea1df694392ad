"""Writes a memory report as one HTML file that needs nothing but a browser.

The file combines the data with the style and the script in page/. Data reaches the page as JSON, which the script shows
as text and never as markup. A content security policy allows this style and this script alone, by their hashes, so the
browser refuses any other and every network request.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from quaver.recorder.draw import COLORS, MOST_COLUMNS, column_maxima

_SCRIPTS = ("words.js", "rows.js", "timeline.js", "icicle.js", "table.js", "compare.js", "main.js")
_NOT_SHOWN = ("report", "config", "against")
_OF_REPORT = ("peak_event", "saved_bytes", "saved_event", "note", "exact", "spans")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""For JSON inside a script element: no text can close the element or open a comment."""


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
    """Write the page of `prediction` to `path`, making its folder.

    Args:
        title: plain text.
        prediction: `Prediction.to_dict(timeline=True)`, for a run with the keys of `RunMemory.to_dict`.
        other: the same of another run: its timeline is drawn on the same scale, with the differences.
        comparison: `Comparison.to_dict()` of the two.
        advice: `Advice.to_dict()`.
        measured: the same step in the form of `prediction`; only its sums are shown.
    Raises:
        ValueError: a report has no "timeline", or a number is not finite.
        OSError: `path` cannot be written.
    """
    labels = comparison or {}
    runs = [_run("prediction", prediction, labels.get("label_a", "this run"))]
    if other is not None:
        runs.append(_run("other", other, labels.get("label_b", "the other run")))
    data = {
        "title": title,
        "colors": COLORS,
        "runs": runs,
        "comparison": comparison,
        "advice": advice,
        "measured": None if measured is None else _about(measured),
    }
    text = _page(title, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def _page(title: str, data: dict[str, Any]) -> str:
    style, script = _part("style.css"), "".join(_part(name) for name in _SCRIPTS)
    values = {
        "title": html.escape(title),
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": embedded_json(data),
    }
    return _PLACEHOLDER.sub(lambda found: values[found[1]], _part("page.html"))


def embedded_json(value: Any) -> str:
    """`value` as JSON for a script element of an HTML page.

    Raises:
        ValueError: a number is infinite or NaN.
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)


def _part(name: str) -> str:
    return (files("quaver.memory.reports") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _run(role: str, prediction: dict[str, Any], label: str) -> dict[str, Any]:
    about = _about(prediction)
    report = prediction["report"]
    tables = {name: _table(report[name]) for name in ("at_peak", "saved_for_backward")}
    return {"label": label, **about, **tables, "timeline": _timeline(role, report)}


def _about(prediction: dict[str, Any]) -> dict[str, Any]:
    """Everything but the tables and the run's settings."""
    report = prediction["report"]
    about = {name: value for name, value in prediction.items() if name not in _NOT_SHOWN}
    return about | {name: report[name] for name in _OF_REPORT} | {"resident": report["resident_bytes"]}


def _timeline(role: str, report: dict[str, Any]) -> dict[str, Any] | None:
    """The columns to draw, by category; None if operators were invisible."""
    if "timeline" not in report:
        raise ValueError(f"{role}: expected a report with its timeline, got one without; use to_dict(timeline=True)")
    if not report["timeline"]:
        return None
    names = report["columns"][2:]
    rows = column_maxima(report["timeline"], MOST_COLUMNS, keep=[report["peak_event"]]).astype("int64")
    series = {name: rows[:, position].tolist() for position, name in enumerate(names, 2) if rows[:, position].any()}
    number = len(report["timeline"])
    return {"number": number, "events": rows[:, 0].tolist(), "series": series}


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as lists, with the column names once."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}
