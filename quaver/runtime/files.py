"""Atomic files and folders: under its name a file is the old one or the new one, and a folder is absent or complete.

Files are replaced. Exports, imports, converted models and checkpoints are new folders.
"""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from quaver.runtime.errors import InputError, NotWrittenError, has_no_room

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255
"""The longest name of a file on the usual file systems."""

_PARTIAL_NAME = ".{}.partial"
"""The name of a folder while it is written, next to its final place."""

_MAX_FOLDER_NAME_BYTES = MAX_NAME_BYTES - len(_PARTIAL_NAME.format(""))
"""The longest name of a folder that leaves room for its partial name."""

_LOCKS_UNSUPPORTED = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP
"""The `errno` of a lock on a file system without locks, such as some mounts of Lustre."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path where the block writes a new file, which replaces `path` when the block ends.

    The new file is on disk before it replaces `path`, and gets the permissions of a file there. An error leaves `path`
    as it was. The name of the new file begins with a dot and ends as the name of `path` does. If `path` is a symlink,
    the file that it points to is replaced, in that file's folder.

    Raises:
        BlockingIOError: another block replaces the file.
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    suffix = os.fsencode(path.name.removeprefix("."))[-(MAX_NAME_BYTES - len(".partial.")) :]
    name = suffix.decode(errors="ignore")
    with _lock_name(target.with_name(name)):
        partial = target.with_name(f".partial.{name}")
        try:
            yield partial
            flush_to_disk(partial)
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
            flush_to_disk(target.parent)
        finally:
            with suppress(OSError):
                partial.unlink()


def check_is_new(path: Path) -> None:
    """Raise FileExistsError if `path` exists, and InputError if its name is too long for `write_new_folder`."""
    if (length := len(os.fsencode(path.name))) > _MAX_FOLDER_NAME_BYTES:
        raise InputError(f"{path.name!r}: expected a name of at most {_MAX_FOLDER_NAME_BYTES} bytes, got {length}")
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another folder or remove it")


@contextmanager
def write_new_folder(path: Path, *, file: str = "") -> Iterator[Path]:
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
    check_is_new(path)
    partial = path.with_name(_PARTIAL_NAME.format(path.name))
    try:
        make_folder(path.parent)
        with _lock_name(path):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                yield partial
                flush_folder(partial)
                check_is_new(path)  # rename() would replace an empty folder made in the meantime
                rename_and_flush(partial / file, path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # must not hide an error of the block
    except NotWrittenError as error:  # of a file in the folder, whose partial name says nothing to a user
        raise NotWrittenError(f"{str(path)!r}: {error}") from error
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


def rename_and_flush(partial: Path, path: Path) -> None:
    """Rename a folder or a file to `path` on the same disk, and flush the new name to disk."""
    partial.rename(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    if os.name != "posix" and path.is_dir():  # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Flush a folder and everything below it to disk, concurrently: the file system writes them together."""
    with make_file_threads() as threads:
        list(threads.map(flush_to_disk, (*folder.rglob("*"), folder)))


def make_file_threads() -> ThreadPoolExecutor:
    """Return a pool of threads for file operations that wait for the disk."""
    return ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), "files")


@contextmanager
def _lock_name(path: Path) -> Iterator[None]:
    """Lock the name `path` for the block, with a file next to it, which the end of the block removes.

    The operating system releases the lock of a process that is killed. Windows has no such lock, and on a file system
    without locks a warning is logged and the block runs.

    Raises:
        BlockingIOError: another block, of this process or of another, has the lock.
        OSError: the file cannot be made.
    """
    if sys.platform == "win32":
        yield
        return
    lock_file = path.with_name(f".lock.{path.name}")
    descriptor = _open_locked(lock_file, path)
    try:
        yield
    finally:
        with suppress(OSError):
            lock_file.unlink()
        os.close(descriptor)


def _open_locked(lock_file: Path, path: Path) -> int:
    """Make `lock_file` unless it exists, lock it, and return its descriptor."""
    import fcntl  # Windows has none

    while True:
        try:
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:  # it would name the lock file
            raise type(error)(error.errno, error.strerror, str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), lock_file.stat()):  # else its last holder has removed it
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise BlockingIOError(f"another process is writing {str(path)!r}; wait until it ends") from error
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _LOCKS_UNSUPPORTED:
                logger.warning("%s: the file system has no locks, so a second writer is not refused", path)
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
