"""Folders that appear under their name complete or not at all: the checkpoints of a run, and converted models.

    step-00000100/            complete: it got this name when everything in it was on the disk
        checkpoint.json       the step, the position in the data, the config, the versions
        tensorwise/           a torch.distributed.checkpoint folder for each model of the run
    .step-00000150.partial/   being written, being deleted, or left by a process that was killed; never read

A rename within one folder is atomic: a crash at any moment leaves the complete checkpoints as they were.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
RECORD = "checkpoint.json"
_COMPLETE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in `path`, which need not exist yet. Only one process may write."""

    path: Path

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(found[1]) for found in map(_COMPLETE.fullmatch, names) if found)

    def complete(self, step: int) -> Path:
        """Return the path of the complete checkpoint of `step`."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the path under which the checkpoint of `step` is written."""
        return self.path / f".step-{step:08d}.partial"

    def begin(self, step: int) -> None:
        """Make an empty folder to write the checkpoint of `step` in."""
        self.remove_partials()
        self.partial(step).mkdir(parents=True)

    def publish(self, step: int, record: dict[str, Any], *, discard_after: int | None = None) -> None:
        """Add `record` to the partial checkpoint of `step` and rename it to its complete name.

        Args:
            discard_after: complete checkpoints of later steps belong to a history that the run left; they are removed.
        """
        (self.partial(step) / RECORD).write_text(json.dumps(record, indent=2, allow_nan=False), encoding="utf-8")
        _sync_all(self.partial(step))
        self._hide([later for later in self.steps() if discard_after is not None and later > discard_after])
        _rename(self.partial(step), self.complete(step))
        self.remove_partials()

    def prune(self, keep_latest_k: int) -> None:
        """Remove all complete checkpoints but the newest `keep_latest_k`; 0 keeps all."""
        self._hide(self.steps()[:-keep_latest_k] if keep_latest_k else [])
        self.remove_partials()

    def remove_partials(self) -> None:
        """Remove what is not a complete checkpoint."""
        for left in self.path.glob(".step-*.partial"):
            shutil.rmtree(left)

    def _hide(self, steps: list[int]) -> None:
        """Make complete checkpoints partial: an interrupted removal leaves nothing that looks complete."""
        for step in steps:
            self.complete(step).rename(self.path / f".step-{step:08d}.removed.partial")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint.json of a complete checkpoint.

    Raises:
        FileNotFoundError: `checkpoint` is not a folder with a checkpoint.json.
        ValueError: the file is damaged, or has a format that this version does not read.
    """
    path = checkpoint / RECORD
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(checkpoint)!r} is not a checkpoint: it has no {RECORD}; give a step-... folder of a run's "
            "checkpoints, or one that quaver convert hf-to-quaver wrote"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; choose another checkpoint") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise ValueError(f"{str(path)!r} has format {found!r}; this version of quaver reads format {FORMAT}")
    return record


def check_new(path: Path) -> None:
    """Raise FileExistsError if `path` exists."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{str(path)!r} exists already; give another folder or remove it")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`; at the end of the block it is on the disk and renamed to `path`.

    An error in the block leaves nothing. What a killed process left is removed by the next call.

    Raises:
        FileExistsError: `path` exists.
        OSError: the folder cannot be made or written.
    """
    check_new(path)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_all(partial)
        check_new(path)  # rename() would replace an empty folder that was made in the meantime
        _rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # an error of the block is more important


def _rename(partial: Path, path: Path) -> None:
    partial.rename(path)
    _sync(path.parent)


def _sync_all(folder: Path) -> None:
    for written in (*folder.rglob("*"), folder):
        _sync(written)


def _sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    if os.name != "posix" and path.is_dir():  # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
