"""Tests the page of a memory report: structure, self-containment, escaping of names, and pictures."""

import hashlib
import html
import json
import re
import tomllib
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from quaver.lab.html import embed_json
from quaver.lab.memory.reports.html import write_html
from quaver.lab.recorder.draw import CATEGORY_COLORS, MAX_COLUMNS, draw_timeline, reduce_rows
from quaver.lab.recorder.recorder import CATEGORIES
from tests.lab.browser.reports import (
    HOSTILE,
    MIB,
    make_advice,
    make_comparison,
    make_report,
    make_unseen,
    make_wide,
    predict_small_model,
)

ROOT = Path(__file__).parents[3]
PAGES = {
    "lab/html/parts": "lab/html/assemble.py",
    "lab/memory/reports/page": "lab/memory/reports/html.py",
    "lab/report/page": "lab/report/page.py",
}
"""The folders of a page's parts, and the file that names them."""


class _Tags(HTMLParser):
    """The elements of a page with their attributes, and its comments, as a browser reads them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.comments = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_comment(self, text):
        self.comments.append(text)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def find_inside(text, tag):
    """Return the text inside each element of a kind."""
    return re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)


def write_page(folder, **about):
    path = folder / "new" / "page.html"
    write_html(path, **{"title": "a step", "prediction": make_report()} | about)
    return path.read_text(encoding="utf-8")


def read_data(text):
    data, _ = find_inside(text, "script")
    return json.loads(data)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Return a page with all that a page can have, and hostile names all over it."""
    more = {"other": make_report(), "comparison": make_comparison(), "advice": make_advice(), "measured": make_report()}
    return write_page(tmp_path_factory.mktemp("page"), title=f"title {HOSTILE}", **more)


def test_a_page_needs_nothing_else_and_allows_this_script_alone(everything):
    page = _Tags(everything)
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|EventSource|\bimport\b", everything)
    loading = {"src", "srcset", "action", "background"}
    assert not [tag for tag, attributes in page.elements if loading & attributes.keys()]
    assert page.all("link") == [{"rel": "icon", "href": "data:,"}]
    assert all(attributes["href"].startswith("#") for attributes in page.all("a"))
    metas = {attributes.get("http-equiv"): attributes.get("content") for attributes in page.all("meta")}
    policy = metas["Content-Security-Policy"]
    _, script = find_inside(everything, "script")
    for kind, text in (("script", script), ("style", *find_inside(everything, "style"))):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", script)


def test_hostile_names_stay_text(everything):
    page = _Tags(everything)
    assert len(page.all("script")) == 2
    assert len(page.comments) == 1
    assert "<!--" not in everything.partition('id="data">')[2]
    titles = [html.unescape(text) for tag in ("title", "h1") for text in find_inside(everything, tag)]
    assert titles == [f"title {HOSTILE}"] * 2
    data = read_data(everything)
    assert data["title"] == f"title {HOSTILE}"
    assert (data["runs"][0]["notes"], data["runs"][0]["label"]) == ([HOSTILE], f"first {HOSTILE}")
    assert (data["comparison"], data["advice"]) == (make_comparison(), make_advice())


def test_any_names_read_back_from_a_page():
    characters = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))  # all but surrogates
    value = {HOSTILE: [HOSTILE, characters, 2**62, None, True, 0.5], characters: []}
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_what_a_page_says_is_what_was_predicted(tmp_path):
    prediction = predict_small_model()
    (run,) = read_data(write_page(tmp_path, prediction=prediction))["runs"]
    report = prediction.pop("report")
    assert {name: run[name] for name in prediction} == prediction
    for name in ("at_peak", "saved_for_backward"):
        table = run[name]
        assert [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]] == report[name]
    timeline = run["timeline"]
    assert timeline["number"] == len(report["timeline"]) == len(timeline["events"])
    for name, series in timeline["series"].items():
        assert series == [row[report["columns"].index(name)] for row in report["timeline"]]
    sums = [sum(values) for values in zip(*timeline["series"].values(), strict=True)]
    assert max(sums) == sums[timeline["events"].index(run["peak_event"])] == prediction["peak_bytes"]


def test_a_run_without_a_timeline_has_a_page(tmp_path):
    (run,) = read_data(write_page(tmp_path, prediction=make_unseen()))["runs"]
    assert (run["timeline"], run["note"]) == (None, "compiled code: not attributed")
    assert run["at_peak"] == {"columns": [], "rows": []}


def test_a_page_of_many_events_stays_small(tmp_path):
    """As many rows as a model of 126 layers has, and more events."""
    text = write_page(tmp_path, prediction=make_wide(events=100_000, rows=4000))
    assert len(text.encode()) < 3_000_000
    (run,) = read_data(text)["runs"]
    timeline = run["timeline"]
    assert timeline["number"] == 100_000
    assert MAX_COLUMNS <= len(timeline["events"]) <= MAX_COLUMNS + 3
    assert timeline["events"] == sorted(set(timeline["events"]))
    assert (timeline["events"][0], timeline["events"][-1]) == (0, 99_999)
    sums = [sum(values) for values in zip(*timeline["series"].values(), strict=True)]
    assert sums[timeline["events"].index(run["peak_event"])] == max(sums) == 100 * MIB


def test_columns_are_the_highest_of_their_neighbours():
    rows = [[event, event / 2, (event * 37) % 101, event % 7] for event in range(1000)]
    kept = reduce_rows(rows, 10, keep=[555]).tolist()
    expected = [max(rows[first : first + 100], key=lambda row: row[2] + row[3]) for first in range(0, 1000, 100)]
    assert kept == sorted({tuple(row): row for row in [rows[0], *expected, rows[555], rows[-1]]}.values())
    assert reduce_rows(rows, 1000).tolist() == rows


def test_reports_without_a_timeline_and_nan_are_refused(tmp_path):
    short = make_report()
    del short["report"]["timeline"]
    with pytest.raises(ValueError, match=r"prediction: expected a report with .*to_dict\(timeline=True\)"):
        write_page(tmp_path, prediction=short)
    with pytest.raises(ValueError, match="other: expected a report with its timeline"):
        write_page(tmp_path, other=short)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json([float("nan")])
    with pytest.raises(OSError, match="/dev/null"):
        write_html(Path("/dev/null/x/page.html"), title="", prediction=make_report())


def test_each_category_has_a_color_of_its_own():
    assert tuple(CATEGORY_COLORS) == CATEGORIES  # in the order of the stack
    assert len(set(CATEGORY_COLORS.values())) == len(CATEGORY_COLORS)


def test_the_parts_of_the_page_are_packaged_and_used():
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["quaver"]
    packaged = {path for pattern in patterns for path in (ROOT / "quaver").glob(pattern)}
    for folder, user in PAGES.items():
        parts = set((ROOT / "quaver" / folder).iterdir())
        assert parts <= packaged
        sources = "".join((ROOT / "quaver" / name).read_text() for name in (user, "lab/html/assemble.py"))
        assert all(f'"{path.name}"' in sources for path in parts)


def test_pictures_are_drawn_and_their_legend_names_what_there_is(tmp_path, monkeypatch):
    for prediction in (make_unseen(), make_report()):
        image = tmp_path / "timeline.png"
        draw_timeline(prediction["report"], image, title="a $title that is no formula")
        assert image.read_bytes().startswith(b"\x89PNG")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_timeline(make_report()["report"], image, title="")
    (legend,) = figures[0].legends
    names = [name for name in reversed(CATEGORIES) if name == "gradients" or make_report()["by_category"].get(name)]
    assert [text.get_text() for text in legend.get_texts()] == [name.replace("_", " ") for name in names]
