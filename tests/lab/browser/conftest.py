"""One browser for all tests of a process, and the pages that it shows."""

import json

import numpy as np
import pytest

from quaver.lab.memory.reports.html import write_html
from quaver.lab.report.page import write_report
from quaver.lab.report.run import RunData, read_runs
from tests.lab.browser import reports as given
from tests.lab.report.records import cast_apart, tensors_of, wide_record, write_run


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from tests.lab.browser.browser import chromium  # skips without selenium, which a conftest cannot

    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """plain: one prediction; full: all that a page can have; real: a model's; wide: as much as there ever is; blind: of
    runs that could not be seen."""
    folder = tmp_path_factory.mktemp("pages")
    more = {"other": _other(), "comparison": given.comparison(), "advice": given.advice(), "measured": _measured()}
    for name, about in (
        ("plain", {"prediction": given.make_report()}),
        ("full", {"prediction": given.make_report()} | more),
        ("real", {"prediction": given.predicted()}),
        ("wide", {"prediction": given.wide(events=6_000, rows=120)}),
        ("blind", {"prediction": given.unseen(), "other": given.unseen(), "measured": given.unseen()}),
    ):
        write_html(folder / f"{name}.html", title=f"{name} {given.HOSTILE}", **about)
    return folder


def _other():
    """Half of what `make_report` takes."""
    other = given.make_report()
    report = other["report"]
    other["peak_bytes"] = report["peak_bytes"] = 50 * given.MIB
    other["by_category"] = {name: size // 2 for name, size in other["by_category"].items()}
    report["timeline"] = [[event, time, *(size // 2 for size in sizes)] for event, time, *sizes in report["timeline"]]
    return other


def _measured():
    measured = given.make_report()
    measured["peak_bytes"] = 125 * given.MIB
    measured["by_category"]["saved_activations"] = 105 * given.MIB
    return measured


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", layers=given.LAYERS, alarms=given.ALARMS, models=("tensorwise", "bfloat16"))
    second = write_run(folder / "second", layers=given.LAYERS, seed=1)
    start = json.loads((second / "provenance.jsonl").read_text())
    start["environment"]["torch"] = "2.14.1"
    (second / "provenance.jsonl").write_text(json.dumps(start) + "\n")
    return read_runs([first, second])


@pytest.fixture(scope="session")
def reports(runs, tmp_path_factory):
    """one, two: of runs with everything; large: 100 layers and 1000 samples, in which one cell is bad."""
    folder = tmp_path_factory.mktemp("reports")
    record = wide_record(tensors_of([f"layers.{at}.ffn" for at in range(given.WIDE // 6)]), 1000)
    record.statistics["sqnr_db"][:] = 30 + np.random.default_rng(0).normal(0, 1, (1000, given.WIDE))
    record.statistics["sqnr_db"][given.BAD_SAMPLE, given.BAD_TENSOR] = -15.0
    apart = write_run(folder / "apart", layers=given.LAYERS, tensors=cast_apart(given.TENSORS))
    recipes = [*runs[:1], *read_runs([apart])]
    for name, shown in (
        ("one", runs[:1]),
        ("two", runs),
        ("recipes", recipes),
        ("large", [RunData("large", folder, numerics=record)]),
    ):
        write_report(folder / f"{name}.html", shown)
    return folder
