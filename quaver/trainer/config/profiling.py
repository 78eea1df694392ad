"""[profiling]: traces of steps, and where the memory of a step goes."""

from dataclasses import dataclass
from pathlib import PurePath

from quaver.trainer.config.settings import AtLeast1, NotNegative, Settings


@dataclass(frozen=True)
class Profiling(Settings, section="profiling"):
    """Traces and memory snapshots of single steps, in the run folder, by every rank."""

    enable_profiling: bool = False
    """Write traces with modules and float8 phases by name, for Perfetto or chrome://tracing."""
    save_traces_folder: str = "profile_trace"
    """Folder of the traces inside the run folder."""
    profile_freq: AtLeast1 = 10
    """Trace the last profiler_active of every so many steps."""
    profiler_warmup: NotNegative = 3
    """Steps before those that the profiler records and discards."""
    profiler_active: AtLeast1 = 1
    """Steps that are traced, one file each."""
    enable_memory_snapshot: bool = False
    """Write the memory of a step: the allocator's history on CUDA, the live tensors on CPU. SIGUSR1 writes another."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of those files inside the run folder."""
    memory_snapshot_step: NotNegative = 3
    """The step to write; 0 for only on SIGUSR1 or when CUDA runs out of memory."""

    def check(self) -> None:
        """Refuse settings of what is off, too short a period, and folders outside of the run's."""
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
            folder = PurePath(getattr(self, name))
            is_inside = bool(folder.parts) and not folder.is_absolute() and ".." not in folder.parts
            self.require(is_inside, name, "a folder inside the run folder")
