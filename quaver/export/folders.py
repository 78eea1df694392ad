"""Atomic folders: exports, imports, converted models and checkpoints appear under their name once complete."""

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quaver.runtime.errors import InputError
from quaver.runtime.files import MAX_NAME_BYTES, lock_name, sync

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""The `errno` of a write without room: a full disk, a quota, or the size limit of a file."""

_PARTIAL_NAME = ".{}.partial"
"""The name of a folder while it is written, next to its final place."""

_MAX_BYTES = MAX_NAME_BYTES - len(_PARTIAL_NAME.format(""))
"""The longest name of a folder that leaves room for its partial name."""


class NotWrittenError(OSError):
    """A result could not be written, for example because the disk is full."""


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
        _make_parents(path)
        with lock_name(path):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                yield partial
                sync_all(partial)
                check_new(path)  # rename() would replace an empty folder made in the meantime
                rename(partial / file, path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # must not hide an error of the block
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NotWrittenError(f"cannot write {str(path)!r}: {error.strerror}") from error
        raise


def _make_parents(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from error


def rename(partial: Path, path: Path) -> None:
    """Rename a folder or a file to `path` on the same disk, and sync the new name."""
    partial.rename(path)
    sync(path.parent)


def sync_all(folder: Path) -> None:
    """`sync` a folder and everything below it, concurrently: the file system writes them together."""
    with make_file_threads() as threads:
        list(threads.map(sync, (*folder.rglob("*"), folder)))


def make_file_threads() -> ThreadPoolExecutor:
    """Return a pool of threads for file operations that wait for the disk."""
    return ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), "files")
