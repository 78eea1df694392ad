"""The tables of docs/performance.md are those of benchmarks/results/roofline/ and benchmarks/results/cpu/."""

import re

import pytest

from benchmarks.performance import COMMANDS, CPU, DOCS, ROOFLINE, read, read_rows, recorded, tables, words
from benchmarks.record import fill
from quaver.cli.bench import VERBS


def test_the_page_is_made_from_the_files():
    page = DOCS.read_text(encoding="utf-8")
    assert fill(page, recorded()) == page, "run python -m benchmarks.performance --update-docs"


def test_another_prediction_would_be_noticed():
    rows, roofline = read_rows(), read(ROOFLINE / "roofline.json")
    before = tables(rows, roofline, {})
    roofline["totals"][0]["speedup"] *= 2
    after = tables([{**row, "speedup": "9.99"} for row in rows], roofline, {})
    assert {name for name in before if before[name] != after[name]} == {"layers", "totals"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_whole_and_names_its_machine(name):
    result = read(CPU / f"{name}.json")
    assert result["complete"]
    assert result["rows"]
    about = result["environment"]
    assert about["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"])
    assert about["command"] == " ".join(["quaver", *words(name)])
    assert COMMANDS[name].split()[0] in VERBS
