"""Keeps the tokens of a source and a tokenizer, so that they are made once: by one process, while others wait."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from quaver.trainer.data.report import byte_progress, say
from quaver.trainer.data.source import Source
from quaver.trainer.data.token_files import FORMAT, DamagedEntryError, Entry, check_content, open_entry, writing
from quaver.trainer.data.tokenizer import Tokenizer

POLL_S = 0.2
"""How often a process that waits looks how far the other is."""

Build = Callable[[Path, Callable[[int], None]], None]
"""Writes an entry into the folder, and tells of the bytes of the source that it has read."""


@dataclass(frozen=True)
class TokenCache:
    """The entry of one source and tokenizer, in `folder`/`key`; `label` is shown while it is made."""

    folder: Path
    key: str
    label: str
    quiet: bool = False

    @property
    def entry_folder(self) -> Path:
        """Where the entry is, once it is made."""
        return self.folder / self.key

    def get(self, build: Build, total_bytes: int, *, check: bool = False) -> Entry:
        """Return the entry, made by `build` unless it is there.

        Of several processes that ask at once, one builds. An entry that is damaged is made anew: one whose files are
        missing or of another size, or, where `check`, whose content differs from its sha256.

        Raises:
            OSError: if the folder cannot be written, or the disk is full; nothing half-written stays.
        """
        entry = self._open(check, quiet=True)
        if entry is not None:
            return entry
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(total_bytes):
            entry = self._open(check, quiet=self.quiet)
            if entry is None:
                self._make(build, total_bytes)
                entry = open_entry(self.entry_folder)
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

    def _make(self, build: Build, total_bytes: int) -> None:
        partial, done = self._beside("partial"), 0
        try:
            with self._writing():
                _remove(partial)  # of a process that was killed
                partial.mkdir()
            with byte_progress(self.label, total_bytes, quiet=self.quiet) as show, self._told_progress() as tell:

                def advance(count: int) -> None:
                    nonlocal done
                    done += count
                    show(count)
                    tell(done)

                build(partial, advance)
            with self._writing():
                _remove(self.entry_folder)
                partial.rename(self.entry_folder)
        finally:
            _remove(partial)

    # ---- one builds, the others wait -----------------------------------------------------------------------------

    @contextmanager
    def _locked(self, total_bytes: int) -> Iterator[None]:
        lock = FileLock(self._beside("lock"))
        with self._writing():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self._wait(lock, total_bytes)
        try:
            yield
        finally:
            lock.release()

    def _wait(self, lock: FileLock, total_bytes: int) -> None:
        with byte_progress("another process makes the tokens", total_bytes, quiet=self.quiet) as show:
            shown = 0
            while True:
                try:
                    lock.acquire(timeout=POLL_S)
                except Timeout:
                    done = self._read_progress()
                    show(max(0, done - shown))
                    shown = max(shown, done)
                else:
                    return

    @contextmanager
    def _told_progress(self) -> Iterator[Callable[[int], None]]:
        """Give a function that leaves the bytes done in a file, for those who wait."""
        path, last = self._beside("progress"), 0.0

        def tell(done: int) -> None:
            nonlocal last
            if time.monotonic() - last > POLL_S:
                last = time.monotonic()
                with self._writing():
                    path.write_text(str(done), encoding="ascii")

        try:
            yield tell
        finally:
            path.unlink(missing_ok=True)

    def _read_progress(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not begun, done, or just being written
            return int(self._beside("progress").read_text(encoding="ascii"))
        return 0

    def _beside(self, kind: str) -> Path:
        return self.folder / f"{self.key}.{kind}"

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing(self.folder)


def cache_key(source: Source, tokenizer: Tokenizer) -> str:
    """Return the name of the entry: it changes with the files (names, sizes, times), the tokenizer, and the format."""
    told = json.dumps([FORMAT, source.identity, tokenizer.digest])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def cache_folder(setting: str) -> Path:
    """Return the folder of data.cache_folder: $XDG_CACHE_HOME/quaver/tokens where it is empty, or in ~/.cache."""
    if setting:
        return Path(setting).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quaver" / "tokens"


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
