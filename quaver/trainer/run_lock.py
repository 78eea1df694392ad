"""One process writes a run folder: a lock that names its holder.

The lock is a file lock of the operating system, which ends with its process however that ends. A second file names the
holder. A run removes it when it releases the lock, so a lock that is free although the file is there was held by a
process that was killed.

[Note: locks of other hosts] On some shared file systems other hosts do not see a file lock. So the holder
touches its file every few seconds, and a free lock with the file of another host is taken over only if nothing touches
the file for a while. Only changes of its time are compared, never the clocks of two hosts.
"""

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from quaver.trainer.json_file import read_json

LOCK, HOLDER = ".writer.lock", ".writer.json"

HEARTBEAT_S, PATIENCE_S = 5.0, 20.0
"""Seconds between two touches of the holder's file, and how long a file of another host must stay as it is."""


class RunLock:
    """The right of this process to write a run folder, from `acquire` to `release` or to its end.

    With several ranks the first one holds it for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / LOCK, thread_local=False)
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock. It waits only to see whether a holder on another host lives: [Note: locks of other hosts].

        If its last holder was killed, a line on stderr names that process.

        Raises:
            BlockingIOError: another run holds it; the message names its host and process.
            OSError: the folder cannot be written.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise self._is_held() from error
        killed = self._holder()
        if killed is not None:
            if killed.get("host", platform.node()) != platform.node() and self._lives(killed):
                self._lock.release()
                raise self._is_held()
            line = f"took over the lock of {str(self._folder)!r} from a run that was killed: {_words(killed)}"
            print(f"quaver: {line}", file=sys.stderr, flush=True)
        holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        partial = self._folder / f"{HOLDER}.partial"
        try:
            partial.write_text(json.dumps(holder) + "\n", encoding="utf-8")
            partial.replace(self._folder / HOLDER)
        except OSError:
            self._lock.release()
            raise
        threading.Thread(target=self._beat, args=(self._folder / HOLDER,), name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._lock.is_locked:
            self._released.set()
            with suppress(OSError):  # the folder may be gone, or no longer writable
                (self._folder / HOLDER).unlink()
            self._lock.release()

    def __del__(self) -> None:
        self.release()

    def _beat(self, path: Path) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError):  # the folder may be gone
                os.utime(path)

    def _lives(self, holder: dict[str, Any]) -> bool:
        line = f"waiting {PATIENCE_S:g} s to see whether another run writes {str(self._folder)!r}: {_words(holder)}"
        print(f"quaver: {line}", file=sys.stderr, flush=True)
        path, until = self._folder / HOLDER, time.monotonic() + PATIENCE_S
        with suppress(FileNotFoundError):  # it has ended meanwhile
            first = path.stat().st_mtime_ns
            while time.monotonic() < until:
                time.sleep(0.1)
                if path.stat().st_mtime_ns != first:
                    return True
        return False

    def _is_held(self) -> BlockingIOError:
        return BlockingIOError(
            f"another run writes the run folder {str(self._folder)!r}: {_words(self._holder())}; "
            "wait until it ends, or stop it"
        )

    def _holder(self) -> dict[str, Any] | None:
        """Return what the file says about the holder, {} if it is damaged, None without one."""
        path = self._folder / HOLDER
        try:
            return read_json(path, TypeAdapter(dict[str, Any]), "remove the file") if path.exists() else None
        except (OSError, ValueError):
            return {}


def _words(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "its process is not known"
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')}"
