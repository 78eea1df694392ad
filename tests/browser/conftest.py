"""One browser for all tests of a process, and the pages that it shows."""

import pytest

from quaver.memory.reports.html import write_html
from tests.browser.reports import HOSTILE, MIB, advice, comparison, made, predicted, unseen, wide


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from tests.browser.browser import chromium  # skips without selenium, which a conftest cannot

    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """plain: one prediction; full: all that a page can have; real: a model's; wide: as much as there ever is; blind: of
    runs that could not be seen."""
    folder = tmp_path_factory.mktemp("pages")
    more = {"other": _other(), "comparison": comparison(), "advice": advice(), "measured": _measured()}
    for name, about in (
        ("plain", {"prediction": made()}),
        ("full", {"prediction": made()} | more),
        ("real", {"prediction": predicted()}),
        ("wide", {"prediction": wide(events=100_000, rows=500)}),
        ("blind", {"prediction": unseen(), "other": unseen(), "measured": unseen()}),
    ):
        write_html(folder / f"{name}.html", title=f"{name} {HOSTILE}", **about)
    return folder


def _other():
    """Half of what `made` takes."""
    other = made()
    report = other["report"]
    other["peak_bytes"] = report["peak_bytes"] = 50 * MIB
    other["by_category"] = {name: size // 2 for name, size in other["by_category"].items()}
    report["timeline"] = [[event, time, *(size // 2 for size in sizes)] for event, time, *sizes in report["timeline"]]
    return other


def _measured():
    measured = made()
    measured["peak_bytes"] = 125 * MIB
    measured["by_category"]["saved_activations"] = 105 * MIB
    return measured
