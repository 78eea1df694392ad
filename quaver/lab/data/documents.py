"""Types of all sources of text: files, pieces of documents, and a count of the items that are not documents."""

import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from quaver.lab.settings.fields import expand_user
from quaver.runtime.errors import InputError

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)

MAX_LISTED_PLACES = 5
"""`SkippedItems` lists the places of this many corrupt items and counts the others."""

NUL = "\0"
"""No text contains it, so it can end a document with the byte tokenizer."""

STDLIB = "stdlib"

STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"pydoc_data", "encodings", "ensurepip"}
)
"""Folders of the standard library that are left out: tests, tables, tools, other packages."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its name within the source, its size, and the times of its last modification and change.

    Copying tools and archives set the modification time; only the system sets the time of the change (ctime).
    """

    name: str
    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_path(cls, name: str, path: Path) -> "SourceFile":
        """Describe the file at `path`. Raises OSError if `stat` fails."""
        status = path.stat()
        return cls(name, path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """A value that differs between versions of the file, and between files of one name in two folders."""
        return self.name, self.size, self.mtime_ns, self.ctime_ns


def find_files(path: str) -> list[SourceFile]:
    """Return the files of `data.path` by name. Hidden files and folders are left out, links to folders not followed.

    Raises OSError if the path does not exist, or a folder cannot be read; InputError for a device, pipe or socket.
    """
    is_library = path == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"]) if is_library else expand_user(path)
    if not root.exists():
        raise FileNotFoundError(f"data.path {path!r} does not exist; give stdlib, a text file or a folder")
    if root.is_file():
        return [SourceFile.from_path(root.name, root)]
    if not root.is_dir():
        raise InputError(f"data.path {path!r} is neither a file nor a folder; give stdlib, a text file or a folder")
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if (name not in STDLIB_SKIPPED if is_library else _is_visible(name))]
        is_included = _is_library_source if is_library else _is_visible
        paths = [Path(folder, name) for name in names if is_included(name)]
        files += [SourceFile.from_path(file.relative_to(root).as_posix(), file) for file in paths if file.is_file()]
    return sorted(files, key=lambda file: file.name)


def _is_library_source(name: str) -> bool:
    # _sysconfigdata contains paths of the machine that built Python.
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _raise(error: OSError) -> None:
    raise error


class Piece(NamedTuple):
    """Text of one document of a split. A long document is several pieces, which are tokenized separately."""

    split: str
    text: str
    ends_document: bool = True


@dataclass
class SkippedItems:
    """Counts the items of a source that are not documents."""

    refuses_corrupt: bool = False
    empty: int = 0
    corrupt: int = 0
    corrupt_places: list[str] = field(default_factory=list)

    def add_corrupt(self, place: str, reason: str) -> None:
        """Count the item at `place` (file, or file:line) as corrupt; with `refuses_corrupt`, raise InputError."""
        if self.refuses_corrupt:
            raise make_corrupt_error(f"{place}: {reason}")
        self.corrupt += 1
        if len(self.corrupt_places) < MAX_LISTED_PLACES:
            self.corrupt_places.append(f"{place}: {reason}")

    def accept_text(self, place: str, value: Any) -> TypeGuard[str]:
        """Return whether `value` is a non-empty string of Unicode without NUL; if not, count it as empty or corrupt."""
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


def make_corrupt_error(problem: str) -> InputError:
    """Return the error for corrupt data under data.on_corrupt = "refuse"."""
    return InputError(f"{problem}; repair or remove it, or set data.on_corrupt to skip")
