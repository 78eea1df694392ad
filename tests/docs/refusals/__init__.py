"""Defines cases for the sentences of docs/ that call something refused, raised or an error, by page and phrase.

A case is what a page says is refused and the words of the error: a call, or a `Command`. `elsewhere.py` names the tests
of sentences that need ranks, another library or a fixture of theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Case:
    """A call that is refused, with the message, its number of lines, and the types that the error may have."""

    refused: Callable[[], Any]
    message: str
    is_slow: bool = False
    lines: int = 1
    kinds: tuple[type[Exception], ...] = (RuntimeError, ValueError)


@dataclass(frozen=True)
class Command:
    """Words of the command line in a folder with `files`, and a part of the one line that they end in."""

    words: str
    message: str
    files: dict[str, bytes] = field(default_factory=dict)
    is_slow: bool = False


Pages = dict[str, dict[str, list[Case | Command]]]


def parameters(pages: Pages) -> list[Any]:
    """Return a parameter of pytest for each case, with an id that names its page."""
    return [
        pytest.param(case, marks=pytest.mark.nightly if case.is_slow else (), id=f"{page}: {phrase[:40]} {number}")
        for page, phrases in pages.items()
        for phrase, cases in phrases.items()
        for number, case in enumerate(cases)
    ]
