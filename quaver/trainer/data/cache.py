"""The token cache: the tokens of a source and a tokenizer are made once, by one process, while others wait."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from quaver.trainer.data.source import Source
from quaver.trainer.data.token_files import FORMAT, DamagedEntryError, Entry, check_content, open_entry, writing
from quaver.trainer.data.tokenizer import Tokenizer
from quaver.trainer.display import Advance, byte_progress, say

Build = Callable[[Path, Advance], None]
"""Writes an entry into a folder and reports the bytes of the source that it reads."""


@dataclass(frozen=True)
class TokenCache:
    """The entry of one source and tokenizer, in `folder`/`key`."""

    folder: Path
    key: str
    quiet: bool = False

    @property
    def entry_folder(self) -> Path:
        """The place of the entry."""
        return self.folder / self.key

    def get(self, build: Build, label: str, total_bytes: int, *, check: bool = False) -> Entry:
        """Return the entry, made by `build` if it is not there; `label` is shown meanwhile.

        Of several processes that ask at once, one builds. A damaged entry is made again: one whose files are missing or
        have another size, or, with `check`, another sha256. An entry that is whole needs no right to write.

        Raises:
            OSError: if the folder cannot be written or the disk is full; nothing half-written stays.
        """
        entry = self._open(check, quiet=True)
        if entry is not None:
            return entry
        lock = FileLock(self.folder / f"{self.key}.lock")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self._wait(lock)
        try:
            entry = self._open(check, quiet=self.quiet)
            if entry is None:
                with byte_progress(label, total_bytes, quiet=self.quiet) as advance:
                    self._make(build, advance)
                entry = open_entry(self.entry_folder)
        finally:
            lock.release()
        return entry

    def _open(self, check: bool, *, quiet: bool) -> Entry | None:
        try:
            entry = open_entry(self.entry_folder)
            if check:
                check_content(self.entry_folder, entry)
        except FileNotFoundError:
            return None
        except DamagedEntryError as error:
            say(f"the tokens in {self.entry_folder} are damaged ({error}); making them again", quiet=quiet)
            return None
        return entry

    def _wait(self, lock: FileLock) -> None:
        say("another process makes the tokens; waiting for it", quiet=self.quiet)
        lock.acquire()

    def _make(self, build: Build, advance: Advance) -> None:
        """Build aside, then rename: an entry is whole or absent."""
        partial = self.folder / f"{self.key}.partial"
        try:
            with writing(self.folder):
                _remove(partial)  # left by a process that was killed
                partial.mkdir()
            build(partial, advance)
            with writing(self.folder):
                _remove(self.entry_folder)
                partial.rename(self.entry_folder)
        finally:
            _remove(partial)


def cache_key(source: Source, tokenizer: Tokenizer) -> str:
    """Return the name of the entry: it changes with the files (names, sizes, times), the tokenizer, and the format."""
    identity = json.dumps([FORMAT, source.identity, tokenizer.digest])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def cache_folder(setting: str) -> Path:
    """Return the folder of data.cache_folder; if that is empty, quaver/tokens in $XDG_CACHE_HOME or ~/.cache."""
    if setting:
        return Path(setting).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quaver" / "tokens"


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
