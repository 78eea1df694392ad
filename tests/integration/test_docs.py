"""README.md and docs/: every relative link leads to a file or a heading, and the README's code runs."""

import re
from pathlib import Path

import pytest

from tests.isolated import Forked

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its blocks and spans of code, where brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading, `code` too\n[there](page.md#a-heading-code-too) `[no](link)`\n[gone](missing.md)\n")
    assert LINK.findall(prose(page)) == ["page.md#a-heading-code-too", "missing.md"]
    assert anchors(page) == {"a-heading-code-too"}
    with pytest.raises(AssertionError, match="missing.md"):
        test_links_lead_somewhere(page)


def test_the_code_of_the_readme_runs():
    code = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code
    done = Forked(exec, "\n".join(code), {"__name__": "__main__"}).finished()
    assert done.returncode == 0, done.stderr
    assert "2 of 2 matmul weights in float8" in done.stdout
