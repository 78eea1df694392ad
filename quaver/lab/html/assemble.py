"""Writes a page as one HTML file that needs nothing but a browser.

Data reaches the page as JSON, which the script shows as text and never as markup. A content security policy allows only
this style and this script, by their hashes, so the browser refuses all others and every network request.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""Escapes for JSON in a script element, so that no text can close the element or open a comment."""
_SHARED = files("quaver.lab.html") / "parts"


@dataclass(frozen=True)
class PageFiles:
    """The files of one kind of page, in a folder that also has header.html, main.html and style.css."""

    folder: Traversable
    """The folder of the files."""
    scripts: tuple[str, ...]
    """Names of scripts in the order in which they run, after elements.js and table.js."""
    kind: str
    """A few words above the title, plain text."""
    footer: str
    """The HTML of the footer."""


def write_page(path: Path, page_files: PageFiles, *, title: str, data: dict[str, Any]) -> None:
    """Write a page to `path`, and make its folder.

    Args:
        title: plain text.
        data: values for JSON, which the script reads from the element "data".
    Raises:
        ValueError: a number of `data` is not finite.
        OSError: `path` cannot be written.
    """
    text = _fill_page(page_files, title, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")  # file names need not be Unicode


def _fill_page(page_files: PageFiles, title: str, data: dict[str, Any]) -> str:
    style = _read(_SHARED, "base.css") + _read(page_files.folder, "style.css")
    shared = (_read(_SHARED, name) for name in ("elements.js", "table.js"))
    script = "".join([*shared, *(_read(page_files.folder, name) for name in page_files.scripts)])
    values = {
        "title": html.escape(title),
        "kind": html.escape(page_files.kind),
        "header": _read(page_files.folder, "header.html"),
        "main": _read(page_files.folder, "main.html"),
        "footer": page_files.footer,
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": embed_json(data),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _read(_SHARED, "frame.html"))


def embed_json(value: Any) -> str:
    """Format `value` as JSON for a script element of an HTML page. Raises ValueError for an inf or NaN."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)


def _read(folder: Traversable, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
