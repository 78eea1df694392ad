"""A folder that appears under its name complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(path: Path) -> None:
    """Raise FileExistsError if there is anything at `path` already."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another folder or remove it")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder beside `path` to write in; when the block is left it is on the disk and called `path`.

    Whatever is raised in the block, nothing stays. What a killed process left is removed by the next one.

    Raises:
        FileExistsError: `path` exists.
        OSError: the folder cannot be made or written.
    """
    check_new(path)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for written in (*partial.rglob("*"), partial):
            sync(written)
        check_new(path)  # a rename would replace an empty folder that was made meanwhile
        partial.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what was raised in the block matters more


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk when this returns."""
    if os.name != "posix" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
