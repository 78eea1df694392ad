"""The measured tables of docs/performance.md are those of benchmarks/results/cpu/."""

import re

import pytest

from benchmarks.measured import COMMANDS, DOCS, read, tables, words
from benchmarks.record import fill
from quaver.cli.bench import VERBS


def test_the_page_is_made_from_the_files():
    page = DOCS.read_text(encoding="utf-8")
    assert fill(page, tables(read())) == page


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_whole_and_names_its_machine(name):
    result = read()[name]
    assert result["complete"]
    assert result["rows"]
    about = result["environment"]
    assert about["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"])
    assert about["command"] == " ".join(["quaver", *words(name)])
    assert COMMANDS[name].split()[0] in VERBS
