"""Shared by the benchmark scripts: Markdown tables, their places in a page, and whether the code was committed."""

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with each table between its `<!-- table: name -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the page lacks these comments.
    """
    for name, table in tables.items():
        before, begin, rest = page.partition(f"<!-- table: {name} -->")
        _, end, after = rest.partition("<!-- end -->")
        if not begin or not end:
            raise ValueError(f"expected <!-- table: {name} --> and <!-- end --> in the page")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def has_changed(folder: str) -> bool | None:
    """Whether files under `folder` differ from the commit; None without git."""
    try:
        command = ["git", "status", "--porcelain", "--", folder]
        return bool(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None
