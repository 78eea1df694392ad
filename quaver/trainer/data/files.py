"""Which files a source has, and what is noticed when they change."""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"

STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"pydoc_data", "encodings", "ensurepip"}
)
"""Folders of the standard library with nothing to learn from: tests, tables, tools, other packages."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its name within the source, and what `stat` told of it."""

    name: str
    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, path: Path) -> "SourceFile":
        """The file at `path` as it is now. Raises OSError if it cannot be asked."""
        found = path.stat()
        return cls(name, path, found.st_size, found.st_mtime_ns)

    @property
    def identity(self) -> tuple[str, int, int]:
        """What changes when the file does."""
        return self.name, self.size, self.mtime_ns


def find_files(path: str) -> list[SourceFile]:
    """Return the files of `data.path` sorted by name; those below hidden folders are left out.

    Raises:
        FileNotFoundError: if the path does not exist.
        OSError: if a folder cannot be read.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path == STDLIB else Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"data.path {path!r} does not exist; give stdlib, a text file or a folder")
    if root.is_file():
        return [SourceFile.of(root.name, root)]
    skipped = _is_skipped_in_library if path == STDLIB else _is_hidden
    return sorted(_walk(root, skipped), key=lambda file: file.name)


def _walk(root: Path, skipped: Callable[[str], bool]) -> Iterator[SourceFile]:
    """Yield the files below `root`, but for what `skipped` says of a folder's or file's own name."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not skipped(f"{name}/")]
        for path in (Path(folder, name) for name in files if not skipped(name)):
            if path.is_file():
                yield SourceFile.of(path.relative_to(root).as_posix(), path)


def _is_skipped_in_library(name: str) -> bool:
    if name.endswith("/"):
        return name.rstrip("/") in STDLIB_SKIPPED
    # _sysconfigdata holds paths of the machine that built Python.
    return not name.endswith(".py") or name.startswith("_sysconfigdata")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") and name.endswith("/")
