"""What every kind of source yields: pieces of documents, and an account of the items that are not text."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

PLACES_LISTED = 5
"""The account lists the places of this many corrupt items and counts the others."""

NUL = "\0"
"""No text contains it, so it can end a document with the byte tokenizer."""


class Piece(NamedTuple):
    """Text of one document of a split. A long document is several pieces, which are tokenized separately."""

    split: str
    text: str
    ends_document: bool = True


@dataclass
class Account:
    """Counts the items of a source that are not documents."""

    refuse: bool = False
    empty: int = 0
    corrupt: int = 0
    corrupt_places: list[str] = field(default_factory=list)

    def add_corrupt(self, place: str, reason: str) -> None:
        """Count the item at `place` (file, or file:line) as corrupt; with `refuse`, raise ValueError."""
        if self.refuse:
            raise refusal(f"{place}: {reason}")
        self.corrupt += 1
        if len(self.corrupt_places) < PLACES_LISTED:
            self.corrupt_places.append(f"{place}: {reason}")

    def is_text(self, place: str, value: Any) -> TypeGuard[str]:
        """Whether `value` is a non-empty string of Unicode without NUL; if not, count it as empty or corrupt."""
        reason = ""
        if not isinstance(value, str):
            reason = f"expected a string, got {type(value).__name__}"
        elif NUL in value:
            reason = "the text contains a 0 byte"
        else:
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                reason = f"the text is not Unicode: {error.reason}"
        if reason:
            self.add_corrupt(place, reason)
        elif not value:
            self.empty += 1
        return not reason and bool(value)


def refusal(what: str) -> ValueError:
    """The error for corrupt data under data.on_corrupt = "refuse"."""
    return ValueError(f"{what}; repair or remove it, or set data.on_corrupt to skip")
