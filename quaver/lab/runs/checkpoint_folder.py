"""The checkpoint folders of a run. A folder gets its name only when it is complete.

    step-00000100/            complete: everything in it was on the disk when it got this name
        checkpoint.json       the step, the position in the data, the config, the versions
        tensorwise/           a torch.distributed.checkpoint folder for each model of the run
        manifest.json         size and xxh3_128 of every other file
    .step-00000150.partial/   being written, being deleted, or left by a process that was killed; never read
    .step-00000200.aside/     complete, but a resume from an earlier step began another history; never read

A rename within one folder is atomic: a crash at any moment leaves the complete checkpoints as they were.

[Note: one history] The complete checkpoints and the records of metrics belong to one history. A resume from an earlier
step first renames the later checkpoints, the last one first, and then removes the later records. After a crash in
between, all complete checkpoints are of one history, and the next resume removes the records after the newest.
Checkpoints set aside stay on the disk until the new history has a complete one.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from annotated_types import MinLen
from pydantic import ConfigDict, StringConstraints, TypeAdapter
from typing_extensions import TypedDict

from quaver.lab.json_file import STRICT, read_json
from quaver.lab.runs.file_names import CONFIG_FILE
from quaver.lab.runs.manifest import CHECKPOINT_HINT, FileDigest, write_manifest
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.fields import AtLeast1, NotNegative, OneOf
from quaver.lab.settings.training import OPTIMIZERS
from quaver.optim.base import STATE_VERSION
from quaver.runtime.errors import InputError
from quaver.runtime.files import flush_folder, rename_and_flush

RECORD_FORMAT = 1
RECORD_FILE = "checkpoint.json"


@dataclass
class RunProgress:
    """The position of a run: its state that is neither a tensor nor a setting."""

    __pydantic_config__: ClassVar[ConfigDict] = {**STRICT, "extra": "forbid"}
    step: NotNegative = 0
    """Optimizer steps done."""
    consumed_sequences: NotNegative = 0
    """Sequences of the data consumed, over all ranks."""
    skipped_steps: dict[str, NotNegative] = field(default_factory=dict)
    """The number of non-finite steps that were skipped, by model."""
    recent_losses: dict[str, list[float]] = field(default_factory=dict)
    """The losses with which a new loss is compared to detect a spike, by model."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """The recipe that an alarm gave a layer, by layer."""


class _CheckpointTraining(TypedDict):
    seq_len: AtLeast1
    seed: NotNegative


class _CheckpointOptimizer(TypedDict):
    name: Annotated[str, OneOf(OPTIMIZERS)]


class _CheckpointConfig(TypedDict):
    model: dict[str, Any]
    training: NotRequired[_CheckpointTraining]  # a converted model has the model section alone
    optimizer: NotRequired[_CheckpointOptimizer]
    float8: NotRequired[dict[str, Any]]
    parallelism: NotRequired[dict[str, Any]]


class _CheckpointData(TypedDict):
    eos_id: NotNegative
    sha256: str


class _CheckpointLayer(TypedDict):
    name: str
    converted: bool
    reason: str


class _CheckpointReport(TypedDict):
    layers: Annotated[list[_CheckpointLayer], MinLen(1)]


class _CheckpointRecord(TypedDict):
    """The fields of checkpoint.json that are read; the file has more."""

    __pydantic_config__ = {**STRICT, "extra": "allow"}  # type: ignore[misc]
    format: Literal[RECORD_FORMAT]  # type: ignore[valid-type]
    models: Annotated[list[Annotated[str, StringConstraints(pattern=r"^\w[\w+-]*$")]], MinLen(1)]
    world_size: AtLeast1
    progress: RunProgress
    optimizer_state_version: NotRequired[Literal[STATE_VERSION]]  # type: ignore[valid-type]
    config: _CheckpointConfig
    data: NotRequired[_CheckpointData]
    conversion_report: NotRequired[_CheckpointReport | None]
    huggingface: NotRequired[dict[str, Any]]


_RECORD_ADAPTER = TypeAdapter(_CheckpointRecord)
_COMPLETE_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in `path`, which need not exist yet. Only one process may write."""

    path: Path

    def list_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in order."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in map(_COMPLETE_NAME.fullmatch, names) if match)

    def get_path(self, step: int) -> Path:
        """Return the path of the complete checkpoint of `step`."""
        return self.path / f"step-{step:08d}"

    def get_partial_path(self, step: int) -> Path:
        """Return the path under which the checkpoint of `step` is written."""
        return self.path / f".step-{step:08d}.partial"

    def set_aside_after(self, step: int) -> list[int]:
        """Rename the complete checkpoints after `step`, and return their steps; see [Note: one history]."""
        later_steps = [later for later in self.list_steps() if later > step]
        for later in reversed(later_steps):
            aside = self.path / f".step-{later:08d}.aside"
            if aside.exists():  # of a still earlier history
                aside.rename(self._get_removed_path(later))
                self.remove_partials()
            rename_and_flush(self.get_path(later), aside)
        return later_steps

    def make_partial(self, step: int) -> None:
        """Make an empty folder to write the checkpoint of `step` in."""
        self.remove_partials()
        self.path.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays so
        self.get_partial_path(step).mkdir()

    def publish(self, step: int, record: dict[str, Any], digests: dict[str, FileDigest] | None = None) -> None:
        """Add `record` and the manifest to the partial checkpoint of `step` and rename it to its complete name.

        Args:
            digests: the known digests, whose files are not read again.
        """
        write_record(self.get_partial_path(step), record, digests)
        flush_folder(self.get_partial_path(step))
        rename_and_flush(self.get_partial_path(step), self.get_path(step))

    def prune(self, keep_latest_k: int) -> None:
        """Remove partial and set-aside checkpoints, and complete ones before the newest `keep_latest_k`, unless 0."""
        for step in self.list_steps()[:-keep_latest_k] if keep_latest_k else []:
            # An interrupted removal leaves nothing that looks complete.
            self.get_path(step).rename(self._get_removed_path(step))
        self.remove_partials()
        for aside in self.path.glob(".step-*.aside"):
            shutil.rmtree(aside)

    def remove_partials(self) -> None:
        """Remove the folders that are being written or deleted, or that a killed process left."""
        for partial in self.path.glob(".step-*.partial"):
            shutil.rmtree(partial)

    def _get_removed_path(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.removed.partial"


def write_record(checkpoint: Path, record: dict[str, Any], digests: dict[str, FileDigest] | None = None) -> None:
    """Write checkpoint.json and then the manifest, the last files of a checkpoint; see `write_manifest`."""
    text = json.dumps(record, indent=2, allow_nan=False)
    (checkpoint / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
    write_manifest(checkpoint, digests or {})


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint.json of a complete checkpoint; its "progress" has the fields of `RunProgress`.

    Raises:
        FileNotFoundError: `checkpoint` is not a folder with a checkpoint.json.
        InputError: the file is damaged, or has a format that this version does not read.
    """
    path = checkpoint / RECORD_FILE
    if not path.is_file():
        if last := find_checkpoint(checkpoint):
            raise FileNotFoundError(
                f"{str(checkpoint)!r} is not a checkpoint but a run; give one of its checkpoints, such as {str(last)!r}"
            )
        reason = f"{RECORD_FILE} is missing" if checkpoint.exists() else "the folder does not exist"
        steps = CheckpointFolder(checkpoint.parent).list_steps()
        others = f"; the checkpoints beside it are of steps {', '.join(map(str, steps))}" if steps else ""
        raise FileNotFoundError(
            f"{str(checkpoint)!r} is not a checkpoint: {reason}{others}; give a step-... folder of a run's checkpoints "
            "(checkpoint.keep_latest_k removes old ones), or one that quaver convert hf-to-quaver wrote"
        )
    checked = read_json(path, _RECORD_ADAPTER, CHECKPOINT_HINT)
    record: dict[str, Any] = {**checked, "progress": asdict(checked["progress"])}
    if "huggingface" not in record:
        names = {f"config.{section}" for section in record["config"]} | set(record)
        for name in ("data", "config.training", "config.optimizer", "config.float8", "config.parallelism"):
            if name not in names:
                raise InputError(f"{str(path)!r} is damaged: {name} is missing; {CHECKPOINT_HINT}")
    return record


def find_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, the last checkpoint if it is a run, or else None.

    Raises FileNotFoundError if the run has no complete checkpoint.
    """
    if (path / RECORD_FILE).is_file():
        return path
    if not (path / CONFIG_FILE).is_file():
        return None
    folder = CheckpointFolder(path / load_config(path / CONFIG_FILE).checkpoint.folder)
    steps = folder.list_steps() if folder.path.is_dir() else []
    if not steps:
        raise FileNotFoundError(
            f"the run {str(path)!r} has no complete checkpoint; set checkpoint.interval and resume it"
        )
    return folder.get_path(steps[-1])
