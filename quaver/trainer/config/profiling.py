"""[profiling]: traces of steps, and where the memory of a step goes."""

from dataclasses import dataclass
from pathlib import PurePath

from quaver.trainer.config.require import require, require_default, require_positive


@dataclass(frozen=True)
class Profiling:
    """What is written about single steps, in the run folder, by every rank."""

    enable_profiling: bool = False
    """Write traces of steps, with the modules and the float8 phases by name, for Perfetto or chrome://tracing."""
    save_traces_folder: str = "profile_trace"
    """Folder of the traces inside the run folder."""
    profile_freq: int = 10
    """Steps from one trace to the next: the last profiler_active steps of each profile_freq are traced."""
    profiler_warmup: int = 3
    """Steps before those in which the profiler runs and what it sees is thrown away."""
    profiler_active: int = 1
    """Steps that are traced, one file for each."""
    enable_memory_snapshot: bool = False
    """Write where the memory of a step goes: on CUDA the allocator's history, on CPU the live tensors by what they are
    for. Besides memory_snapshot_step, SIGUSR1 asks for it: of the current step on CUDA, of the next on CPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of those files inside the run folder."""
    memory_snapshot_step: int = 3
    """The step that is written; 0 means only when asked for, and when CUDA is out of memory."""

    def __post_init__(self) -> None:
        if not self.enable_profiling:
            for name in ("save_traces_folder", "profile_freq", "profiler_warmup", "profiler_active"):
                require_default("profiling", self, name, unless="profiling.enable_profiling is true")
        if not self.enable_memory_snapshot:
            for name in ("save_memory_snapshot_folder", "memory_snapshot_step"):
                require_default("profiling", self, name, unless="profiling.enable_memory_snapshot is true")
        require_positive("profiling", self, "profile_freq", "profiler_active")
        for name in ("profiler_warmup", "memory_snapshot_step"):
            require(getattr(self, name) >= 0, f"profiling.{name}", "not negative", getattr(self, name))
        window = self.profiler_warmup + self.profiler_active
        require(
            self.profile_freq >= window,
            "profiling.profile_freq",
            f"at least profiler_warmup + profiler_active = {window}",
            self.profile_freq,
        )
        for name in ("save_traces_folder", "save_memory_snapshot_folder"):
            folder = PurePath(getattr(self, name))
            is_inside = bool(folder.parts) and not folder.is_absolute() and ".." not in folder.parts
            require(is_inside, f"profiling.{name}", "a folder inside the run folder", getattr(self, name))
