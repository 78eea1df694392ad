"""The folder of a run, new or resumed.

[Note: refusals write nothing] `RunFolder.open` checks a resume and takes the lock. `begin` makes the first change of
the folder, after the checkpoint was loaded. So a resume that is refused leaves every file of the run as it was.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.runs.errors import reraise_as_not_written
from quaver.lab.runs.file_names import (
    CONFIG_FILE,
    CURVES_FILE,
    FLOAT8_SCALES_FILE,
    METRICS_FILE,
    NUMERICS_FILE,
    POST_MORTEM_FILE,
    PROVENANCE_FILE,
    RUN_FILES,
    SUMMARY_FILE,
    WANDB_ID_FILE,
)
from quaver.lab.runs.json_lines import read_json_lines, rewind_json_lines
from quaver.lab.runs.lock import HOLDER_FILE, LOCK_FILE, RunLock
from quaver.lab.runs.provenance import read_starts
from quaver.lab.runs.resume import find_resume_state, remove_resume_settings
from quaver.lab.settings import Checkpoint, TrainConfig, require
from quaver.lab.settings.config_file import write_config
from quaver.lab.settings.fields import expand_user
from quaver.lab.settings.float8 import make_file_name
from quaver.runtime.errors import NotWrittenError, make_write_error
from quaver.runtime.files import make_folder, replace_file

SUBFOLDER_SETTINGS = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)
"""Settings that name a folder in the run folder."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run, made by `open`. `resume_step` is the step to resume from, None for a new run."""

    path: Path
    resume_step: int | None = None
    changed_settings: dict[str, list[Any]] = field(default_factory=dict)
    """The settings that changed since the run's earlier start, by name: old value and new value."""

    lock: RunLock | None = field(default=None, compare=False)
    """Held by the process that may write the folder."""

    is_new: bool = field(default=False, compare=False)
    """Whether `open` made the folder."""

    @classmethod
    def open(cls, config: TrainConfig) -> "RunFolder":
        """Find or make dump_folder/name, as config.checkpoint.resume says, and take its lock; see `begin`.

        Raises:
            FileExistsError: the folder has files or recorded steps already, and the run does not resume.
            FileNotFoundError: there is no checkpoint to resume from.
            BlockingIOError: another process writes the run.
            InputError: the model or the initial weights differ from the run's.
            OSError: the folder cannot be created or written; a NotWrittenError for want of space.
        """
        path, is_new = _make_folder(config)
        lock = RunLock(path)
        with _explain_lock_errors(path):
            lock.acquire()
        try:
            resume_state = _check_and_find_resume_state(path, config)  # again: a run may have ended in between
            return cls(path, *resume_state, lock, is_new)
        except BaseException:
            lock.release()
            raise

    def begin(self, config: TrainConfig) -> list[str]:
        """Write the resolved config, set the checkpoints after the resumed step aside, and remove its later records.

        See [Note: one history] in checkpoint_folder.py. It also removes the summary, which says how an earlier start
        ended; and, if there are later records, the run's id at Weights & Biases, where they stay.

        Returns:
            Notes for the user: what is removed or missing.
        Raises:
            InputError: the metrics or the provenance are damaged; nothing was written.
            NotWrittenError: a file cannot be written.
        """
        step = self.resume_step or 0
        notes = []
        if (starts := self.path / PROVENANCE_FILE).exists():
            read_starts(starts)
        if step and not self.metrics_path.exists():
            notes.append(f"{METRICS_FILE} is missing: a new file begins after step {step}")
        try:
            files = [self.metrics_path, self.float8_scales_path, self.numerics_path]
            with rewind_json_lines(files, step) as removed:
                if removed:
                    (self.path / WANDB_ID_FILE).unlink(missing_ok=True)
                if set_aside := self.get_checkpoint_folder(config.checkpoint).set_aside_after(step):
                    removed = [*removed, f"the checkpoints of step {', '.join(map(str, set_aside))}"]
                post_mortem = self.post_mortem_path
                if post_mortem.exists() and any(line["step"] > step for line in read_json_lines(post_mortem)):
                    post_mortem.unlink()
                    removed = [*removed, POST_MORTEM_FILE]
                (self.path / SUMMARY_FILE).unlink(missing_ok=True)
                write_config(remove_resume_settings(config), self.path / CONFIG_FILE)
        except OSError as error:
            reason = error.strerror or error
            raise NotWrittenError(f"cannot write the run folder {str(self.path)!r}: {reason}") from error
        if removed:
            start = f"goes on after step {step}" if step else "begins again at step 0"
            notes.append(f"the run {start} and removes {', '.join(removed)}")
        return notes

    def check_exists(self) -> None:
        """Raise NotWrittenError if the folder was removed: what the run still writes would be lost."""
        if not (self.path / CONFIG_FILE).exists():
            raise NotWrittenError(f"the run folder {str(self.path)!r} was removed while the run trained; the run ends")

    def release(self) -> None:
        """Let other processes write the folder. A new folder in which a refused start wrote nothing is removed."""
        if self.lock is None:
            return
        if self.is_new and self.lock.is_held:
            with suppress(OSError):  # the folder is gone, or cannot be changed
                if {entry.name for entry in self.path.iterdir()} <= {LOCK_FILE, HOLDER_FILE}:
                    shutil.rmtree(self.path)
        self.lock.release()

    def get_stacks_path(self, rank: int) -> Path:
        """Return the path of the stacks that the watchdog of a rank writes."""
        return self.path / f"stacks-rank{rank}.txt"

    def get_checkpoint_folder(self, config: Checkpoint) -> CheckpointFolder:
        """Return the run's checkpoints."""
        return CheckpointFolder(self.path / config.folder)

    def add_provenance(self, start: dict[str, Any]) -> None:
        """Append a line to provenance.jsonl, which has one for each start of the run. Raises NotWrittenError.

        An incomplete last line, of a start that was killed, is removed.
        """
        path = self.path / PROVENANCE_FILE
        line = json.dumps({**start, "from_step": self.resume_step or 0, "changes": self.changed_settings}) + "\n"
        with reraise_as_not_written(path), replace_file(path) as partial:
            earlier = path.read_bytes() if path.exists() else b""
            partial.write_bytes(earlier[: earlier.rfind(b"\n") + 1] + line.encode())

    @property
    def metrics_path(self) -> Path:
        """JSON lines: one per step and model, and per validation."""
        return self.path / METRICS_FILE

    @property
    def curves_path(self) -> Path:
        """The plot of the losses."""
        return self.path / CURVES_FILE

    @property
    def float8_scales_path(self) -> Path:
        """JSON lines: the persistent scales of each recorded step; see float8_scales.py."""
        return self.path / FLOAT8_SCALES_FILE

    @property
    def numerics_path(self) -> Path:
        """JSON lines: statistics of the float8 matmuls of sampled steps (quaver/numerics/record.py)."""
        return self.path / NUMERICS_FILE

    @property
    def post_mortem_path(self) -> Path:
        """JSON lines: the last samples before a value that was not finite."""
        return self.path / POST_MORTEM_FILE

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write `value` to the file `name`, replacing it atomically. Raises NotWrittenError."""
        path = self.path / name
        with reraise_as_not_written(path), replace_file(path) as partial:
            partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def check_run_folder(config: TrainConfig) -> Path:
    """Refuse what `RunFolder.open` refuses, and return the path of the run folder. Writes nothing."""
    path = expand_user(config.job.dump_folder) / (config.job.name or _name_by_time(config))
    if config.job.name:
        with _explain_lock_errors(path):
            RunLock(path).check_is_free()  # first: the advice for a folder that has files would harm a run
        _check_and_find_resume_state(path, config)
    else:
        _check_subfolders(path, config)
    return path


def _make_folder(config: TrainConfig) -> tuple[Path, bool]:
    """Make dump_folder/name if it does not exist, or a new folder for a run without a name. A refusal makes nothing.

    Returns the folder, and whether it is new.
    """
    path = check_run_folder(config)
    try:
        make_folder(path.parent)
        if not config.job.name:
            return _make_unused_folder(path), True
        is_new = not path.exists()
        make_folder(path)
    except OSError as error:
        raise _make_write_error(path, error) from error
    return path, is_new


def _make_unused_folder(path: Path) -> Path:
    """Make `path`, or if that exists the first of path-2, path-3 and so on that does not, and return its path."""
    folder, number = path, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:  # of a run that started in the same second
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
        else:
            return folder


def _name_by_time(config: TrainConfig) -> str:
    precision = config.training.mixed_precision_param
    if config.float8.enable_float8_linear:
        precision = make_file_name(config.float8.label)
    compared = "-compare" if config.job.compare else ""
    return f"{precision}{compared}-{datetime.now():%Y%m%d-%H%M%S}"


@contextmanager
def _explain_lock_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the lock of `path` into one with a fix, except for BlockingIOError, which has one."""
    try:
        yield
    except IsADirectoryError as error:
        file = error.filename2 or error.filename
        raise IsADirectoryError(f"cannot write {str(file)!r}: {error.strerror}; remove it") from error
    except BlockingIOError:
        raise
    except OSError as error:
        raise _make_write_error(path, error) from error


def _make_write_error(path: Path, error: OSError) -> OSError:
    return make_write_error(error, f"the run folder {str(path)!r}", "give another job.dump_folder")


def _check_and_find_resume_state(path: Path, config: TrainConfig) -> tuple[int | None, dict[str, list[Any]]]:
    """Check the folder's files and `SUBFOLDER_SETTINGS`, and return `find_resume_state` of them."""
    try:
        # A killed process may leave partial files; their names begin with a dot.
        names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    except FileNotFoundError:
        names = set()
    except OSError as error:
        raise _make_write_error(path, error) from error
    _check_subfolders(path, config)
    return find_resume_state(path, config, names)


def _check_subfolders(path: Path, config: TrainConfig) -> None:
    """Raise InputError if one of SUBFOLDER_SETTINGS is a file of the run, or the folder of another setting or in it."""
    folders = {name: attrgetter(name)(config) for name in SUBFOLDER_SETTINGS}
    for name, folder in folders.items():
        others = {Path(other) for other_name, other in folders.items() if other_name != name}
        is_disjoint = others.isdisjoint((Path(folder), *Path(folder).parents))
        require(is_disjoint, name, "a folder that is not in that of another setting", folder)
        has_place = (path / folder).is_dir() or not (path / folder).exists()
        expected = "a folder, with a name that no other file of the run has"
        require(Path(folder).parts[0] not in RUN_FILES and has_place, name, expected, folder)
