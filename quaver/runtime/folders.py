"""Atomic folders: exports, imports, converted models and checkpoints appear under their name once complete."""

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quaver.runtime.errors import InputError, NotWrittenError, has_no_room
from quaver.runtime.files import MAX_NAME_BYTES, flush_to_disk, lock_name

_PARTIAL_NAME = ".{}.partial"
"""The name of a folder while it is written, next to its final place."""

_MAX_BYTES = MAX_NAME_BYTES - len(_PARTIAL_NAME.format(""))
"""The longest name of a folder that leaves room for its partial name."""


def check_new(path: Path) -> None:
    """Raise FileExistsError if `path` exists, and InputError if its name is too long for `new_folder`."""
    if (length := len(os.fsencode(path.name))) > _MAX_BYTES:
        raise InputError(f"{path.name!r}: expected a name of at most {_MAX_BYTES} bytes, got {length}")
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another folder or remove it")


@contextmanager
def new_folder(path: Path, *, file: str = "") -> Iterator[Path]:
    """Yield an empty folder next to `path`; the end of the block syncs it to disk and renames it to `path`.

    With `file`, `path` becomes the file of this name that the block made in the folder. An error in the block leaves
    nothing. The next call removes what a killed process left.

    Raises:
        FileExistsError: `path` exists.
        BlockingIOError: another block writes `path`.
        InputError: the name of `path` is too long.
        NotWrittenError: the disk or the quota is full.
        OSError: the folder cannot be made or written.
    """
    check_new(path)
    partial = path.with_name(_PARTIAL_NAME.format(path.name))
    try:
        make_folder(path.parent)
        with lock_name(path):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                yield partial
                flush_folder(partial)
                check_new(path)  # rename() would replace an empty folder made in the meantime
                rename(partial / file, path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # must not hide an error of the block
    except OSError as error:
        if has_no_room(error):
            raise NotWrittenError(f"cannot write {str(path)!r}: {error.strerror}") from error
        raise


def make_folder(path: Path) -> None:
    """Make a folder and its parents unless they exist. Raises NotADirectoryError if `path` is a file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error


def rename(partial: Path, path: Path) -> None:
    """Rename a folder or a file to `path` on the same disk, and flush the new name to disk."""
    partial.rename(path)
    flush_to_disk(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder and everything below it to disk, concurrently: the file system writes them together."""
    with make_file_threads() as threads:
        list(threads.map(flush_to_disk, (*folder.rglob("*"), folder)))


def make_file_threads() -> ThreadPoolExecutor:
    """Return a pool of threads for file operations that wait for the disk."""
    return ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), "files")
