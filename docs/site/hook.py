"""mkdocs hook: README.md is the landing page, and what pages link to outside of docs/ becomes a part of the site."""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
HERE = re.compile(r"https://github\.com/quaver-float8/quaver/(?:blob|tree|raw)/main/")
"""How README.md links to files of the repository: a package index shows it too, where relative links lead nowhere."""


def _place(path: Path) -> str:
    """Where the site has a file or folder of the repository, relative to docs/."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        inside = path.relative_to(DOCS).as_posix()
        return f"{inside}/README.md" if path.is_dir() else inside
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}.md" if path.is_dir() or path.suffix in (".py", ".ipynb") else f"repository/{name}"


def _targets(page: Path) -> list[Path]:
    """The files and folders that a page or a notebook links to."""
    prose = CODE.sub("", _text(page))
    paths = (_target(link, page) for link, _ in LINK.findall(prose))
    return [path for path in paths if path is not None]


def _target(link: str, page: Path) -> Path | None:
    """The file or folder of the repository that a link of a page leads to; None for any other link."""
    inside, count = HERE.subn("", link)
    path = ((ROOT if count else page.parent) / inside).resolve()
    return None if re.match(r"[a-z]+:", inside) or not path.exists() else path


def _text(path: Path) -> str:
    """A page for a file or folder: Markdown as it is, code in a block, a folder's files, a notebook's cells."""
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix == ".py")
        return f"# {path.name}\n\n" + "\n\n".join(f"## {each.name}\n\n{_block(each)}" for each in files)
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
        return "\n\n".join(f"```python\n{text}\n```" if is_code else text for text, is_code in texts)
    return path.read_text(encoding="utf-8") if path.suffix == ".md" else f"# {path.name}\n\n{_block(path)}"


def _block(path: Path) -> str:
    return f"```python\n{path.read_text(encoding='utf-8')}```\n"


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, and each file outside of docs/ that a page links to."""
    todo = [ROOT / "README.md", *DOCS.rglob("*.md")]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        place = _place(path)
        if files.get_file_from_path(place) is None and not path.is_relative_to(DOCS):
            if place.endswith(".md"):
                file = File.generated(config, place, content=_text(path))
            else:
                file = File.generated(config, place, abs_src_path=str(path))
            files.append(file)
        if path.suffix in (".md", ".ipynb"):
            todo += _targets(path)
    config.extra["sources"] = {_place(path): path for path in seen}
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the page's links to the places that the site has."""
    source = config.extra["sources"].get(page.file.src_uri)
    if source is None or source.suffix not in (".md", ".ipynb"):
        return markdown

    def moved(match: "re.Match[str]") -> str:
        link, anchor = match.groups()
        path = _target(link, source)
        if path is None:
            return match[0]
        place = os.path.relpath(_place(path), os.path.dirname(page.file.src_uri))
        return f"]({place}{anchor or ''})"

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(moved, part) for part in parts)
