"""Each sentence of docs/ that calls something refused, raised or an error has a case that shows it, or names a test."""

import os
import re
from pathlib import Path

import pytest
import torch

from tests.docs.refusals import Case, Command, Pages, of_commands, of_models, of_weights, parameters
from tests.docs.refusals.elsewhere import ELSEWHERE

ROOT = Path(__file__).parents[2]
WORDS = re.compile(
    r"\b(refuse[sd]?|refusals?|raises?|(is|are|an) errors?|exit codes? (is )?\d|(not |un)supported|not allowed)\b", re.I
)
"""Words of the sentences that promise a refusal."""


def pages() -> dict[str, str]:
    """Return README.md and each page of docs/ and docs/design/ by its path from docs/; docs/lab/ records the past."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/design").glob("*.md"))]
    return {os.path.relpath(path, ROOT / "docs"): path.read_text(encoding="utf-8") for path in paths}


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, each in one line; a row of a table is one, and a heading none."""
    blocks = re.sub(r"\n(?=\s*(- |\||#|\d+\. |```))", "\n\n", re.sub(r"(?m)^([|#].*)$", r"\1\n", text))
    lines = [" ".join(block.split()) for block in re.split(r"\n\s*\n", blocks)]
    return [
        sentence
        for line in lines
        if not line.startswith("#")
        for sentence in ([line] if line.startswith("|") else re.split(r"(?<=[.?!])\**\s+(?=[A-Z`\"*(\[])", line))
    ]


PAGES: Pages = {}
for module in (of_weights, of_models, of_commands):
    for name, phrases in module.PAGES.items():
        PAGES.setdefault(name, {}).update(phrases)


@pytest.mark.parametrize("page", pages())
def test_every_sentence_has_a_case(page):
    lines, phrases = sentences(pages()[page]), [*PAGES.get(page, {}), *ELSEWHERE.get(page, {})]
    assert [phrase for phrase in phrases if not any(phrase in sentence for sentence in lines)] == []
    promises = [sentence for sentence in lines if WORDS.search(sentence)]
    assert [sentence for sentence in promises if not any(phrase in sentence for phrase in phrases)] == []


def test_tests_of_other_files_are_there():
    assert {*PAGES, *ELSEWHERE} <= {*pages()}
    for test in {test for phrases in ELSEWHERE.values() for tests in phrases.values() for test in tests.split()}:
        path, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("case", parameters(PAGES))
def test_what_a_page_refuses_is_refused_in_one_line(case, tmp_path, monkeypatch, refused):
    if isinstance(case, Case):
        with torch.enable_grad(), pytest.raises(case.kinds, match=case.message) as caught:
            case.refused()
        assert len(str(caught.value).splitlines()) == case.lines
        return
    assert isinstance(case, Command)
    monkeypatch.chdir(tmp_path)
    for name, content in case.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert case.message in refused(*case.words.split())
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
