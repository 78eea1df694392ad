"""[job], [metrics], [numerics] and [profiling]: where the run is written, and which numbers it records and shows."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from quaver.conversion.layer_recipes import HIGH_PRECISION
from quaver.lab.settings.fields import (
    AtLeast1,
    FiniteNotNegative,
    NotNegative,
    OneOf,
    Settings,
    is_folder_name,
    setting,
)
from quaver.numerics.accumulation import ACCUMULATION_BY_GPU
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName

FALLBACK_RECIPES = (
    HIGH_PRECISION,
    *(
        recipe.value
        for recipe in Float8LinearRecipeName
        if not Float8LinearConfig.from_recipe_name(recipe).has_persistent_scales
    ),
)


@dataclass(frozen=True)
class Job(Settings, section="job"):
    """The run folder, and the bfloat16 baseline."""

    name: str = setting("", "The run's folder in dump_folder; if empty, it is named by recipe and time.")
    dump_folder: str = setting("runs", "Folder of all runs.")
    compare: bool = setting(
        False, "Also train a bfloat16 baseline from the same weights on the same data (short: --compare)."
    )

    def check(self) -> None:
        """Raise InputError for a path where a name is needed, and for an empty folder."""
        hint = "put parent folders in job.dump_folder"
        self.require(is_folder_name(self.name), "name", "the name of one folder", hint)
        self.require(bool(self.dump_folder), "dump_folder", "a folder")


@dataclass(frozen=True)
class Metrics(Settings, section="metrics"):
    """Printed lines and logs; metrics.jsonl always has every step."""

    log_freq: AtLeast1 = setting(10, "Steps between two printed lines; each validation prints one.")
    float8_scales_freq: NotNegative = setting(
        1, "Steps between two lines of float8_scales.jsonl with a delayed recipe; 0 for none."
    )
    loss_spike_deviations: FiniteNotNegative = setting(
        6.0, "A loss this many robust deviations above the median of the last 64 is a spike; 0 disables the check."
    )
    enable_tensorboard: bool = setting(False, "Write TensorBoard events (pip install 'quaver[tensorboard]').")
    save_tb_folder: str = setting("tb", "Folder of the TensorBoard events in the run folder.")
    enable_wandb: bool = setting(
        False, "Log to Weights & Biases (pip install 'quaver[wandb]'); WANDB_MODE=offline keeps it local."
    )
    wandb_project: str = setting("quaver", "Project of the run.")

    def check(self) -> None:
        """Raise InputError for names that no logger reads, and for a folder outside of the run folder."""
        for name, owner in (("save_tb_folder", "enable_tensorboard"), ("wandb_project", "enable_wandb")):
            self.require(bool(getattr(self, name)), name, "a name")
            if not getattr(self, owner):
                self.require_default(name, unless=f"metrics.{owner}")
        self.require(_is_inside(self.save_tb_folder), "save_tb_folder", "a folder inside the run folder")


@dataclass(frozen=True)
class Numerics(Settings, section="numerics"):
    """Statistics of every float8 matmul in single steps: numerics.jsonl, and the loggers of [metrics]."""

    every: NotNegative = setting(0, "Steps between two samples, the first of which is the first step; 0 for none.")
    extras_every: NotNegative = setting(
        20, "Histograms and the SQNR of other recipes, for each linear in one of this many samples; 0 for none."
    )

    emulate_sums_of: Annotated[str, OneOf(("none", *ACCUMULATION_BY_GPU))] = setting(
        "none", "Emulate this GPU's accumulation for a few rows of each of these samples' matmuls, on any device."
    )
    on_alarm: Annotated[str, OneOf(("log", "stop", "fallback"))] = setting(
        "log",
        "log: print and record it. stop: end the run with a checkpoint. fallback: from the next step on, the linear "
        "that the alarm names uses fallback_recipe; followers do if they stay bad. Checkpoints record this.",
    )
    fallback_recipe: Annotated[str, OneOf(FALLBACK_RECIPES)] = setting(
        HIGH_PRECISION, "The recipe of a linear that falls back."
    )

    def check(self) -> None:
        """Raise InputError for settings that nothing reads."""
        if not self.every:
            self.require_default("extras_every", "emulate_sums_of", "on_alarm", unless="numerics.every is set")
        if not self.extras_every:
            self.require_default("emulate_sums_of", unless="numerics.extras_every is 1 or more")
        if self.on_alarm != "fallback":
            self.require_default("fallback_recipe", unless="numerics.on_alarm is fallback")


@dataclass(frozen=True)
class Profiling(Settings, section="profiling"):
    """Traces and memory snapshots of single steps, by every rank."""

    enable_profiling: bool = setting(False, "Write traces for Perfetto or chrome://tracing.")
    save_traces_folder: str = setting("profile_trace", "Folder of the traces in the run folder.")
    profile_freq: AtLeast1 = setting(10, "Steps of a cycle, the last profiler_active of which are traced.")
    profiler_warmup: NotNegative = setting(3, "Steps before the traced ones that are recorded and discarded.")
    profiler_active: AtLeast1 = setting(1, "Steps that are traced, one file each.")
    enable_memory_snapshot: bool = setting(
        False, "Write a step's allocator history (CUDA) or live tensors (CPU). SIGUSR1 writes another."
    )
    save_memory_snapshot_folder: str = setting("memory_snapshot", "Folder of the snapshots in the run folder.")
    memory_snapshot_step: NotNegative = setting(
        3, "The step to write; 0 for none but on SIGUSR1 or when CUDA runs out of memory."
    )

    def check(self) -> None:
        """Raise InputError for settings of a disabled profiler, a short period or a folder outside the run folder."""
        if not self.enable_profiling:
            trace_names = ("save_traces_folder", "profile_freq", "profiler_warmup", "profiler_active")
            self.require_default(*trace_names, unless="profiling.enable_profiling is true")
        if not self.enable_memory_snapshot:
            snapshot_names = ("save_memory_snapshot_folder", "memory_snapshot_step")
            self.require_default(*snapshot_names, unless="profiling.enable_memory_snapshot is true")
        period = self.profiler_warmup + self.profiler_active
        expected = f"at least profiler_warmup + profiler_active = {period}"
        self.require(self.profile_freq >= period, "profile_freq", expected)
        for name in ("save_traces_folder", "save_memory_snapshot_folder"):
            self.require(_is_inside(getattr(self, name)), name, "a folder inside the run folder")


def _is_inside(folder: str) -> bool:
    """Return whether `folder`, relative to the run folder, names a folder in it."""
    path = PurePath(folder)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in folder
