"""Files that are replaced as a whole: a process that is killed leaves the old file or the new one."""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255
"""The longest name of a file on the usual file systems."""

_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP
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
    with lock_name(target.with_name(name)):
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


def flush_to_disk(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    if os.name != "posix" and path.is_dir():  # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_name(path: Path) -> Iterator[None]:
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
    lock = path.with_name(f".lock.{path.name}")
    descriptor = _open_locked(lock, path)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _open_locked(lock: Path, path: Path) -> int:
    """Make the file `lock` unless it exists, lock it, and return its descriptor."""
    import fcntl  # Windows has none

    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:  # it would name the lock
            raise type(error)(error.errno, error.strerror, str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):  # else its last holder has removed it
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise BlockingIOError(f"another process is writing {str(path)!r}; wait until it ends") from error
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning("%s: the file system has no locks, so a second writer is not refused", path)
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
