"""The files of a source, and the attributes by which a change is noticed."""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from quaver.trainer.config.settings import expanded

STDLIB = "stdlib"

STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"pydoc_data", "encodings", "ensurepip"}
)
"""Folders of the standard library that are left out: tests, tables, tools, other packages."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its name within the source, and its size and modification time."""

    name: str
    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, path: Path) -> "SourceFile":
        """The file at `path` as it is now. Raises OSError if `stat` fails."""
        found = path.stat()
        return cls(name, path, found.st_size, found.st_mtime_ns)

    @property
    def identity(self) -> tuple[str, int, int]:
        """Differs between versions of the file."""
        return self.name, self.size, self.mtime_ns


def find_files(path: str) -> list[SourceFile]:
    """Return the files of `data.path` sorted by name. Hidden folders are left out, links to folders not followed.

    Raises:
        FileNotFoundError: if the path does not exist.
        OSError: if a folder cannot be read.
    """
    is_library = path == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"]) if is_library else expanded(path)
    if not root.exists():
        raise FileNotFoundError(f"data.path {path!r} does not exist; give stdlib, a text file or a folder")
    if root.is_file():
        return [SourceFile.of(root.name, root)]
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not (name in STDLIB_SKIPPED if is_library else name.startswith("."))]
        paths = [Path(folder, name) for name in names if not is_library or _is_library_source(name)]
        found += [SourceFile.of(file.relative_to(root).as_posix(), file) for file in paths if file.is_file()]
    return sorted(found, key=lambda file: file.name)


def _is_library_source(name: str) -> bool:
    # _sysconfigdata contains paths of the machine that built Python.
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _raise(error: OSError) -> None:
    raise error
