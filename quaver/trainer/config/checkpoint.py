"""[checkpoint]: when a run is saved, and what it begins from."""

from dataclasses import dataclass
from pathlib import Path

from quaver.trainer.config.require import is_folder_name, require, require_default, require_positive

ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
RESUME_POLICIES = ("never", "auto", "must")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of the run, each complete or not there at all; and what a run begins from."""

    enable: bool = True
    """Save every interval steps, after the last step, and when Ctrl-C or SIGTERM ends the run."""
    folder: str = "checkpoint"
    """Folder of the checkpoints inside the run folder."""
    interval: int = 500
    """Steps between two checkpoints."""
    keep_latest_k: int = 3
    """How many checkpoints are kept, the newest; 0 keeps all."""
    async_mode: str = "async"
    """disabled: training waits until a checkpoint is written. async: only until it is copied to host memory.
    async_with_pinned_mem: CUDA copies faster, into page-locked memory that is kept from one checkpoint to the next."""
    resume: str = "never"
    """never: refuse a run folder with files. auto: go on from its last checkpoint, or begin if it has none (needs
    job.name). must: refuse to begin anew. (--resume RUN_FOLDER is must, with the config of that folder.)"""
    load_step: int = -1
    """The step to go on from; -1 for the newest. Newer checkpoints are removed when the run saves again."""
    initial_load_path: str = ""
    """Checkpoint whose weights a new run begins with: a step-... folder, or what quaver convert hf-to-quaver wrote."""

    def __post_init__(self) -> None:
        require_positive("checkpoint", self, "interval")
        is_one = bool(self.folder) and is_folder_name(self.folder)
        require(is_one, "checkpoint.folder", "the name of one folder", self.folder)
        require(self.keep_latest_k >= 0, "checkpoint.keep_latest_k", "not negative", self.keep_latest_k)
        for name, choices in (("async_mode", ASYNC_MODES), ("resume", RESUME_POLICIES)):
            value = getattr(self, name)
            require(value in choices, f"checkpoint.{name}", f"one of {', '.join(choices)}", value)
        if not self.enable:
            for name in ("folder", "interval", "keep_latest_k", "async_mode"):
                require_default("checkpoint", self, name, "checkpoint.enable")
        if self.resume == "never":
            require_default("checkpoint", self, "load_step", "checkpoint.resume is auto or must")
        if self.resume == "must":
            require_default(
                "checkpoint", self, "initial_load_path", "the run may begin anew", "its own checkpoint has the weights"
            )
        require(self.load_step >= -1, "checkpoint.load_step", "-1 or the step of a checkpoint", self.load_step)

    @property
    def initial_weights(self) -> Path:
        """`initial_load_path`, with ~ expanded."""
        return Path(self.initial_load_path).expanduser()
