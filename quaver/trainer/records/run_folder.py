"""The folder of one run and every file that goes into it: made once, never over an older run unless it goes on."""

import itertools
import json
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quaver.trainer.checkpoints.folder import CheckpointFolder
from quaver.trainer.config import Checkpoint, TrainConfig
from quaver.trainer.config_io import load_config, write_config
from quaver.trainer.errors import OutputError
from quaver.trainer.records.metrics import rewind_metrics

CONFIG = "config.toml"

UNRELATED = ("job", "checkpoint", "metrics", "comm", "profiling")
"""Sections that change what is kept and shown of a run, and not the run."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; `open` is the way to get one. `resume_step` is the step to go on from, None for a new run."""

    path: Path
    resume_step: int | None = None
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """By name, the settings that differ from those that the run had before: the old value and the new."""

    @classmethod
    def open(cls, config: TrainConfig) -> "RunFolder":
        """Make dump_folder/name, or find it as config.checkpoint.resume says, and write the resolved config there.

        Of a run that goes on, records of steps after the one it goes on from are taken out of the metrics.

        Raises:
            FileExistsError: the folder has files already, and the run is to begin anew.
            FileNotFoundError: there is no checkpoint to go on from.
            ValueError: the model is another one than that of the run.
            OSError: if it cannot be made or written.
        """
        dump_folder = Path(config.job.dump_folder).expanduser()
        path = dump_folder / config.job.name if config.job.name else _unused_path(dump_folder, config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # A name with a dot is what a process that was killed had begun to write.
            names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
        except OSError as error:
            raise _unwritable(path, error) from error
        step = _resume_step(path, config.checkpoint, is_run=CONFIG in names)
        if names and (config.checkpoint.resume == "never" or CONFIG not in names):
            raise FileExistsError(_used(path, config.checkpoint))
        changes = _changes(path, config) if step is not None else {}
        folder = cls(path, step, changes)
        try:
            write_config(_as_begun(config), path / CONFIG)
            for metrics in (folder.metrics, folder.float8_scales):
                rewind_metrics(metrics, step or 0)
        except OSError as error:
            raise _unwritable(path, error) from error
        return folder

    def stacks(self, rank: int) -> Path:
        """What the watchdog found on a rank."""
        return self.path / f"stacks-rank{rank}.txt"

    def checkpoints(self, config: Checkpoint) -> CheckpointFolder:
        """The run's checkpoints."""
        return CheckpointFolder(self.path / config.folder)

    def add_provenance(self, about: dict[str, Any]) -> None:
        """Add a line to provenance.jsonl, which has one for each time that the run was begun or gone on with."""
        with (self.path / "provenance.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, "from_step": self.resume_step or 0, "changes": self.changes}) + "\n")

    @property
    def metrics(self) -> Path:
        """One JSON object per line, one line per step and twin, and per validation."""
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The plot."""
        return self.path / "curves.png"

    @property
    def float8_scales(self) -> Path:
        """One JSON object per line, one line per recorded step: the kept scales; see scales.py."""
        return self.path / "float8_scales.jsonl"

    @property
    def float8_scales_plot(self) -> Path:
        """The picture of them."""
        return self.path / "float8_scales.png"

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write `value` to the file `name`, replacing it in one move so that no reader sees half of it.

        Raises:
            OutputError: it cannot be written.
        """
        partial = self.path / f".{name}.partial"
        try:
            partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(self.path / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OutputError(f"cannot write {str(self.path / name)!r}: {error.strerror}") from error


def _unused_path(dump_folder: Path, config: TrainConfig) -> Path:
    precision = config.training.mixed_precision_param
    if config.float8.enable_float8_linear:
        precision = config.float8.recipe_name
    compared = "-compare" if config.job.compare else ""
    name = f"{precision}{compared}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (dump_folder / (name + (f"-{count}" if count > 1 else "")) for count in itertools.count(1))
    return next(path for path in candidates if not path.exists())


def _unwritable(path: Path, error: OSError) -> OSError:
    return type(error)(
        f"cannot write the run folder {str(path)!r}: {error.strerror or error}; give another job.dump_folder"
    )


def _used(path: Path, config: Checkpoint) -> str:
    if config.resume != "never":
        return f"the folder {str(path)!r} has files but is not a run: it has no {CONFIG}; give another job.name"
    can_go_on = (path / CONFIG).exists() and CheckpointFolder(path / config.folder).steps()
    other = f"go on with it by --resume {path}" if can_go_on else "remove it"
    return f"the run folder {str(path)!r} has files already; give another job.name or {other}"


def _resume_step(path: Path, config: Checkpoint, *, is_run: bool) -> int | None:
    """The step of the checkpoint to go on from, None for a run that begins."""
    if config.resume == "never":
        return None
    steps = CheckpointFolder(path / config.folder).steps() if is_run else []
    if config.load_step != -1:
        if config.load_step not in steps:
            have = ", ".join(map(str, steps)) or "no step"
            raise FileNotFoundError(
                f"checkpoint.load_step must be a step that {str(path)!r} has, got {config.load_step}; it has {have}"
            )
        return config.load_step
    if not steps and config.resume == "must":
        what = "has no complete checkpoint" if is_run else "is not a run folder"
        raise FileNotFoundError(f"{str(path)!r} {what}, so there is nothing to resume; begin the run without --resume")
    return steps[-1] if steps else None


def _as_begun(config: TrainConfig) -> TrainConfig:
    """`config` without how this start found the run, so that the file begins another like it."""
    return replace(config, checkpoint=replace(config.checkpoint, resume="never", load_step=-1))


def _changes(path: Path, config: TrainConfig) -> dict[str, list[Any]]:
    before, now = asdict(load_config(path / CONFIG)), asdict(config)
    changes = {
        f"{section}.{name}": [before[section][name], value]
        for section, values in now.items()
        if section not in UNRELATED
        for name, value in values.items()
        if before[section][name] != value
    }
    for name, (old, new) in changes.items():
        if name.startswith("model."):
            raise ValueError(f"{name} must be {old!r}, that of the run in {str(path)!r}, got {new!r}; begin a new run")
    return changes
