"""The folder of a run's checkpoints on disk: complete ones under their step's name, and nothing else that counts.

    step-00000100/            complete: it was given this name when everything in it was on the disk
        checkpoint.json       the step, the position in the data, the config, the versions
        tensorwise/           a torch.distributed.checkpoint folder for each model of the run
    .step-00000150.partial/   being written, or left by a process that was killed; never read

A rename within one folder either happens or does not, so a crash at any moment leaves the complete ones as they were.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from quaver.trainer.checkpoints.new_folder import sync
from quaver.trainer.checkpoints.single_process import first_line
from quaver.trainer.errors import CheckpointError

FORMAT = 1
RECORD = "checkpoint.json"
_COMPLETE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in `path`, which need not exist yet. Only one process may write."""

    path: Path

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(found[1]) for found in map(_COMPLETE.fullmatch, names) if found)

    def complete(self, step: int) -> Path:
        """Where the complete checkpoint of `step` is."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it is complete."""
        return self.path / f".step-{step:08d}.partial"

    def begin(self, step: int) -> None:
        """Make an empty folder to write the checkpoint of `step` in."""
        self.remove_partials()
        self.partial(step).mkdir(parents=True)

    def publish(self, step: int, record: dict[str, Any]) -> None:
        """Add `record` to what was written for `step`, and make it the complete checkpoint, over an older one."""
        partial, complete = self.partial(step), self.complete(step)
        with (partial / RECORD).open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        for folder in [each for each in partial.iterdir() if each.is_dir()] + [partial]:
            sync(folder)
        if complete.exists():  # of a run that was begun again from an earlier step: never the newest that counts
            complete.rename(self.path / f".{complete.name}.replaced.partial")
        partial.rename(complete)
        sync(self.path)

    def remove_after(self, step: int) -> None:
        """Remove complete checkpoints of later steps: of a history that was given up by going on from `step`."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def prune(self, keep_latest_k: int) -> None:
        """Remove all complete checkpoints but the newest `keep_latest_k`; 0 keeps all."""
        for step in self.steps()[:-keep_latest_k] if keep_latest_k else []:
            self._remove(step)

    def remove_partials(self) -> None:
        """Remove what was never completed."""
        for left in self.path.glob(".step-*.partial"):
            shutil.rmtree(left)

    def _remove(self, step: int) -> None:
        # Out of the names that count first: a removal that is cut short leaves nothing that looks complete.
        doomed = self.path / f".step-{step:08d}.removed.partial"
        self.complete(step).rename(doomed)
        shutil.rmtree(doomed)


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint.json of a complete checkpoint.

    Raises:
        FileNotFoundError: `checkpoint` is no folder with a checkpoint.json.
        ValueError: it is not of a format that this version reads.
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
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise ValueError(f"{str(path)!r} has format {found!r}; this version of quaver reads format {FORMAT}")
    return record


def read_metadata(path: Path) -> Metadata:
    """What torch.distributed.checkpoint saved in the folder `path`: names, shapes and dtypes.

    Raises:
        CheckpointError: there is nothing of the kind, or it cannot be read, or is damaged.
    """
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle raises anything
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"cannot read {str(path)!r}: {reason}; choose another checkpoint") from error
