"""A lock that lets one process at a time write a run folder, and that names its holder.

It protects metrics and checkpoints from a second `--resume` of the same run. The lock is a file lock of the operating
system, which is released however its process ends. A second file names the holder. A run removes it when it releases
the lock, so if the lock is free and the file exists, the last holder was killed.

On a file system without such locks, such as some mounts of Lustre, filelock warns and takes the existence of the file
as the lock. It then removes the file of a killed process of the same host, and no other.
"""

import json
import os
import platform
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from pydantic import TypeAdapter

from quaver.lab.json_file import read_json
from quaver.lab.terminal.escape import print_to_stderr
from quaver.runtime.errors import InputError
from quaver.runtime.files import replace_file

LOCK_FILE, HOLDER_FILE = ".writer.lock", ".writer.json"

ACQUIRE_TIMEOUT_S = 0.5
"""How long to try to take the lock: longer than `check_is_free` of another start of the run holds it."""


class RunLock:
    """The right of this process to write a run folder, from `acquire` to `release`, or as long as the object lives.

    With several ranks the first one holds it for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False)
        self._finalizer: weakref.finalize[..., RunLock] | None = None

    def acquire(self) -> None:
        """Take the lock. If its last holder was killed, a line on stderr names that process.

        Raises:
            BlockingIOError: another run holds it; the message names its host and process.
            OSError: the folder cannot be written.
        """
        self._take_lock()
        killed_holder = self._read_holder()
        if killed_holder is not None:
            folder, killed = repr(str(self._folder)), _describe_holder(killed_holder)
            print_to_stderr(f"took over the lock of {folder} from a run that was killed: {killed}")
        holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            with replace_file(self._folder / HOLDER_FILE) as partial:
                partial.write_text(json.dumps(holder) + "\n", encoding="utf-8")
        except OSError:
            self._lock.release()
            raise
        self._finalizer = weakref.finalize(self, _release_lock, self._lock, self._folder / HOLDER_FILE)

    def check_is_free(self) -> None:
        """Raise BlockingIOError if another run holds the lock. Writes nothing."""
        if (self._folder / LOCK_FILE).exists():
            self._take_lock()
            self._lock.release()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._finalizer is not None and self._finalizer.alive

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._finalizer is not None:
            self._finalizer()

    def _take_lock(self) -> None:
        try:
            self._lock.acquire(timeout=ACQUIRE_TIMEOUT_S)
        except Timeout as error:
            holder = _describe_holder(self._read_holder())
            raise BlockingIOError(
                f"another run writes the run folder {str(self._folder)!r}: {holder}; wait until it ends, or stop it"
            ) from error

    def _read_holder(self) -> dict[str, Any] | None:
        """Return what the file says about the holder, {} if it is damaged, None without one."""
        path = self._folder / HOLDER_FILE
        try:
            return read_json(path, TypeAdapter(dict[str, Any]), "remove the file") if path.exists() else None
        except (OSError, InputError):
            return {}


def _release_lock(lock: BaseFileLock, holder_file: Path) -> None:
    with suppress(OSError):  # the folder may be gone, or no longer writable
        holder_file.unlink()
    lock.release()


def _describe_holder(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "its process is not known"
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')}"
