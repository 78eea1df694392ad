"""The token cache: one process makes the tokens of a source and a tokenizer, once, while others wait for them."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from quaver.lab.data.progress import Advance, CacheProgress
from quaver.lab.data.source import TextSource
from quaver.lab.data.token_files import (
    ENTRY_FILE,
    ENTRY_FORMAT,
    CacheEntry,
    DamagedEntryError,
    count_entry_bytes,
    explain_cache_errors,
    open_entry,
)
from quaver.lab.data.tokenizer import Tokenizer
from quaver.lab.settings import require
from quaver.lab.settings.fields import expand_user
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.lab.terminal.escape import print_to_stderr
from quaver.runtime.files import make_folder

LOCK_TIMEOUT_S = 3600
"""How long a process waits for another one, on this host or another, which makes the tokens."""

LARGE_ENTRY_BYTES = 1 << 32
"""The hash of a larger entry takes more than about a second."""

Build = Callable[[Path, Advance], None]
"""Writes an entry into a folder and reports the bytes of the source that it reads."""


@dataclass(frozen=True)
class TokenCache:
    """The entry of one source and tokenizer, in `folder`/`key`."""

    folder: Path
    key: str
    tokenizer: Tokenizer
    progress: CacheProgress = field(default_factory=CacheProgress)

    @property
    def entry_folder(self) -> Path:
        """The path of the entry."""
        return self.folder / self.key

    def get(self, build: Build, label: str, total_bytes: int) -> CacheEntry:
        """Return the entry. If it does not exist, `build` makes it, and `label` is shown meanwhile.

        Of several processes that ask at once, one builds. It replaces a damaged entry after a line on stderr. Opening
        an intact entry writes nothing.

        Raises:
            InputError: if the folder belongs to another user, and the current user may write it.
            TimeoutError: if another process has held the lock of the entry for `LOCK_TIMEOUT_S`.
            OSError: if the folder cannot be written or the disk is full; nothing half-written stays.
        """
        self._check_owner()
        entry, _ = self._open_entry()
        if entry is not None:
            return entry
        lock = FileLock(self.folder / f"{self.key}.lock")
        with explain_cache_errors(self.folder):
            make_folder(self.folder)
            is_locked = _acquire(lock, timeout_s=0)
        if not is_locked:
            self.progress.print_line(f"waiting for another process, which makes the tokens and holds {lock.lock_file}")
            with explain_cache_errors(self.folder):
                is_locked = _acquire(lock, timeout_s=LOCK_TIMEOUT_S)
        if not is_locked:
            raise TimeoutError(
                f"waited {LOCK_TIMEOUT_S} s for the process that makes the tokens and holds {lock.lock_file!r}; start "
                "again when that process has ended"
            )
        try:
            entry, damage = self._open_entry()  # again: another process may have made it
            if entry is None:
                if damage:
                    print_to_stderr(f"the tokens in {self.entry_folder} are damaged ({damage}); making them again")
                with self.progress.show_reading(label, total_bytes) as advance:
                    self._make_entry(build, advance)
                entry = open_entry(self.entry_folder)
        finally:
            lock.release()
        return entry

    def _open_entry(self) -> tuple[CacheEntry | None, str]:
        """Return the entry and ""; None and what is wrong with a damaged entry; or None and "" if none exists."""
        try:
            size = count_entry_bytes(self.entry_folder)
            if size > LARGE_ENTRY_BYTES:
                self.progress.print_line(f"checking the hash of {format_bytes(size)} of tokens")
            entry = open_entry(self.entry_folder)
            for name in ("vocab_size", "eos_id"):
                if entry.description[name] != getattr(self.tokenizer, name):
                    raise DamagedEntryError(f"{ENTRY_FILE} has the {name} of another tokenizer")
        except FileNotFoundError:
            return None, ""
        except DamagedEntryError as error:
            return None, str(error)
        return entry, ""

    def _check_owner(self) -> None:
        """Refuse a folder into which another user can write tokens under the name that this run computes."""
        if os.getuid() == 0 or not self.folder.exists():
            return
        is_own = self.folder.stat().st_uid in (os.getuid(), 0)
        expected = "a folder that belongs to you, or that you cannot write"
        require(is_own or not os.access(self.folder, os.W_OK), "data.cache_folder", expected, str(self.folder))

    def _make_entry(self, build: Build, advance: Advance) -> None:
        """Build aside, then rename: an entry is whole or absent."""
        partial = self.folder / f"{self.key}.partial"
        try:
            with explain_cache_errors(self.folder):
                _remove_folder(partial)  # left by a process that was killed
                partial.mkdir()
            build(partial, advance)
            with explain_cache_errors(self.folder):
                _remove_folder(self.entry_folder)
                partial.rename(self.entry_folder)
        finally:
            _remove_folder(partial)


def compute_cache_key(source: TextSource, tokenizer: Tokenizer) -> str:
    """Return the name of the entry, which depends on the files (names, sizes, times), the tokenizer and the format."""
    identity = json.dumps([ENTRY_FORMAT, source.identity, tokenizer.digest])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def resolve_cache_folder(setting: str) -> Path:
    """Return data.cache_folder, by default $XDG_CACHE_HOME/quaver/tokens or ~/.cache/quaver/tokens."""
    if setting:
        return expand_user(setting)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quaver" / "tokens"


def _acquire(lock: FileLock, *, timeout_s: float) -> bool:
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        return False
    return True


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
