"""Folders that appear under their name complete or not at all: exports, imports, converted models, checkpoints."""

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of a write to a disk, or of a user, with no room left."""


class NotWrittenError(OSError):
    """A result could not be written, for want of space for example."""


def check_new(path: Path) -> None:
    """Raise FileExistsError if `path` exists."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another folder or remove it")


@contextmanager
def new_folder(path: Path, *, file: str = "") -> Iterator[Path]:
    """Yield an empty folder next to `path`; at the end of the block it is on the disk and renamed to `path`.

    With `file`, `path` becomes the file of this name that the block has made in the folder. An error in the block
    leaves nothing. What a killed process left is removed by the next call.

    Raises:
        FileExistsError: `path` exists.
        NotWrittenError: there is no room for what the block writes.
        OSError: the folder cannot be made or written.
    """
    check_new(path)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_all(partial)
        check_new(path)  # rename() would replace an empty folder that was made in the meantime
        rename(partial / file, path)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NotWrittenError(f"cannot write {str(path)!r}: {error.strerror}") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # an error of the block is more important


def rename(partial: Path, path: Path) -> None:
    """Rename a folder or a file to `path` on the same disk, and return when the new name is on the disk."""
    partial.rename(path)
    sync(path.parent)


def sync_all(folder: Path) -> None:
    """`sync` everything below `folder`, and itself, at once: the file system writes them together."""
    with file_threads() as threads:
        list(threads.map(sync, (*folder.rglob("*"), folder)))


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    if os.name != "posix" and path.is_dir():  # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_threads() -> ThreadPoolExecutor:
    """Threads for file operations that wait for the disk."""
    return ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), "files")
