"""[checkpoint]: when a run is saved, and from which weights it begins."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quaver.lab.settings.fields import (
    AtLeast1,
    Integer,
    NotNegative,
    OneOf,
    Settings,
    expand_user,
    is_folder_name,
    setting,
)

ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
RESUME_POLICIES = ("never", "auto", "must")


@dataclass(frozen=True)
class Checkpoint(Settings, section="checkpoint"):
    """Checkpoints, and the weights that a run begins with."""

    enable: bool = setting(True, "Save every interval steps, after the last step, and on Ctrl-C or SIGTERM.")
    folder: str = setting("checkpoint", "Folder of the checkpoints in the run folder.")
    interval: AtLeast1 = setting(500, "Steps between two checkpoints.")
    keep_latest_k: NotNegative = setting(3, "Newest checkpoints that stay on disk; 0 for all.")
    async_mode: Annotated[str, OneOf(ASYNC_MODES)] = setting(
        "async",
        "disabled: block until written. async: block until copied to host memory, page-locked with "
        "async_with_pinned_mem.",
    )
    resume: Annotated[str, OneOf(RESUME_POLICIES)] = setting(
        "never",
        "never: refuse a run folder with files. auto: resume if there is a checkpoint (needs job.name). must: "
        "refuse to start without a checkpoint.",
    )
    load_step: Integer = setting(
        -1, "The step to resume from; -1 for the newest. The next save removes newer checkpoints."
    )
    verify: bool = setting(True, "Compare size and xxh3_128 of every file with the manifest before loading.")
    initial_load_path: str = setting(
        "", "Initial weights: a step-... folder, or one from quaver convert hf-to-quaver. A resume does not read them."
    )

    def check(self) -> None:
        """Raise InputError for a folder that is a path, and for settings that nothing reads."""
        self.require(bool(self.folder) and is_folder_name(self.folder), "folder", "the name of one folder")
        if not self.enable:
            self.require_default("folder", "interval", "keep_latest_k", "async_mode", unless="checkpoint.enable")
        if self.resume == "never":
            self.require_default("load_step", unless="checkpoint.resume is auto or must")
        self.require(self.load_step >= -1, "load_step", "-1 or the step of a checkpoint")

    @property
    def initial_weights(self) -> Path:
        """`initial_load_path`, with ~ expanded."""
        return expand_user(self.initial_load_path)
