"""Provides one browser for all tests of a process, and the pages that it shows."""

import json

import numpy as np
import pytest

from quaver.lab.memory.reports.html import write_html
from quaver.lab.report.page import write_report
from quaver.lab.report.run import RunData, read_runs
from tests.lab.browser import reports as samples
from tests.lab.report.records import make_tensors, make_wide_record, split_casts, write_run


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from tests.lab.browser.browser import chromium  # skips without selenium, which a conftest cannot

    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Return pages: plain, of one prediction; full, with all that a page can have; real, of a model; wide, with as much
    as there ever is; blind, of runs that could not be seen."""
    folder = tmp_path_factory.mktemp("pages")
    prediction = {"prediction": samples.make_report()}
    more = {"other": make_other(), "comparison": samples.make_comparison(), "measured": make_measured()}
    about = {"plain": prediction, "full": prediction | more | {"advice": samples.make_advice()}}
    about |= {"real": {"prediction": samples.predict_small_model()}}
    about |= {"wide": {"prediction": samples.make_wide(events=6_000, rows=120)}}
    about |= {"blind": {name: samples.make_unseen() for name in ("prediction", "other", "measured")}}
    for name, parts in about.items():
        write_html(folder / f"{name}.html", title=f"{name} {samples.HOSTILE}", **parts)
    return folder


def make_other():
    """Half of what `make_report` takes."""
    other = samples.make_report()
    report = other["report"]
    other["peak_bytes"] = report["peak_bytes"] = 50 * samples.MIB
    other["by_category"] = {name: size // 2 for name, size in other["by_category"].items()}
    report["timeline"] = [[event, time, *(size // 2 for size in sizes)] for event, time, *sizes in report["timeline"]]
    return other


def make_measured():
    measured = samples.make_report()
    measured["peak_bytes"] = 125 * samples.MIB
    measured["by_category"]["saved_activations"] = 105 * samples.MIB
    return measured


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", layers=samples.LAYERS, alarms=samples.ALARMS, models=("tensorwise", "bfloat16"))
    second = write_run(folder / "second", layers=samples.LAYERS, seed=1)
    start = json.loads((second / "provenance.jsonl").read_text())
    start["environment"]["torch"] = "2.14.1"
    (second / "provenance.jsonl").write_text(json.dumps(start) + "\n")
    return read_runs([first, second])


@pytest.fixture(scope="session")
def reports(runs, tmp_path_factory):
    """Return reports: one and two, with everything; large, of 100 layers and 1000 samples with one bad cell."""
    folder = tmp_path_factory.mktemp("reports")
    record = make_wide_record(make_tensors([f"layers.{at}.ffn" for at in range(samples.WIDE // 6)]), 1000)
    record.statistics["sqnr_db"][:] = 30 + np.random.default_rng(0).normal(0, 1, (1000, samples.WIDE))
    record.statistics["sqnr_db"][samples.BAD_SAMPLE, samples.BAD_TENSOR] = -15.0
    apart = write_run(folder / "apart", layers=samples.LAYERS, tensors=split_casts(samples.TENSORS))
    recipes = [*runs[:1], *read_runs([apart])]
    shown = {"one": runs[:1], "two": runs, "recipes": recipes, "large": [RunData("large", folder, numerics=record)]}
    for name, runs_of_page in shown.items():
        write_report(folder / f"{name}.html", runs_of_page)
    return folder
