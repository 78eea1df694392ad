"""What every kind of source gives: documents, and an account of what it could not read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

PLACES_KEPT = 5
"""So many places of corrupt items are remembered; the others are counted."""

NUL = "\0"
"""Text never holds it, so that with the byte tokenizer it can end a document."""


@dataclass(frozen=True)
class Document:
    """A text for one of the SPLITS, in pieces that are tokenized one by one and may be read when they are asked for."""

    split: str
    pieces: Iterable[str]


@dataclass
class Account:
    """Counts what a source holds besides documents."""

    refuse: bool = False
    empty: int = 0
    corrupt: int = 0
    corrupt_places: list[str] = field(default_factory=list)

    def add_corrupt(self, place: str, reason: str) -> None:
        """Count the item at `place` (file, or file:line) as corrupt; with `refuse`, raise ValueError."""
        if self.refuse:
            raise refusal(f"{place}: {reason}")
        self.corrupt += 1
        if len(self.corrupt_places) < PLACES_KEPT:
            self.corrupt_places.append(f"{place}: {reason}")

    def is_text(self, place: str, value: Any) -> bool:
        """Whether `value` is a string to learn from; if not, it is counted as empty or as corrupt."""
        reason = _not_text(value)
        if reason:
            self.add_corrupt(place, reason)
        elif not value:
            self.empty += 1
        return not reason and bool(value)


def refusal(what: str) -> ValueError:
    """The error for corrupt data that data.on_corrupt does not let pass."""
    return ValueError(f"{what}; mend or remove it, or set data.on_corrupt to skip")


def _not_text(value: Any) -> str:
    if not isinstance(value, str):
        return f"expected a string, got {type(value).__name__}"
    if NUL in value:
        return "the text holds a 0 byte"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"the text is no Unicode: {error.reason}"
    return ""
