"""Profiles single steps as [profiling] asks. Writes, in the run folder, for each rank and model,

    profile_trace/step-000010/tensorwise-rank0.json.gz         a trace of the step, for Perfetto
    memory_snapshot/step-000003/tensorwise-rank0.json, .png    CPU: its live tensors (quaver.lab.memory)
    memory_snapshot/step-000003/tensorwise-rank0.pickle        CUDA: the allocator's history until its end,
                                                               for https://pytorch.org/memory_viz

docs/profiling.md describes the files. Ranks do not wait for each other here: a write error is kept, and ends the run on
all ranks after the step. SIGUSR1 asks the rank that receives it for snapshots.
"""

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from quaver import Float8Linear
from quaver.lab.recorder.draw import draw_timeline
from quaver.lab.recorder.timeline import record_timeline
from quaver.lab.runs.errors import OutputFailures, reraise_as_not_written
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.float8 import make_file_name
from quaver.lab.trainer.process import SnapshotRequests, count_snapshot_signals
from quaver.linear.scale_state import LinearScaleSlots
from quaver.runtime.devices import is_cuda_device
from quaver.runtime.files import replace_file
from quaver.torch_private.memory import dump_snapshot, record_memory_history

MAX_HISTORY_ENTRIES = 100_000
"""The newest allocations and frees in CUDA's history."""


class Profiler:
    """Profiles steps that the config names or SIGUSR1 asks for."""

    def __init__(
        self, config: TrainConfig, folder: Path, rank: int, device: torch.device, failures: OutputFailures
    ) -> None:
        """Take `folder`, the run folder on every rank, and `failures`, which keeps write errors."""
        self._config, self._folder, self._rank, self._device = config, folder, rank, device
        self._failures = failures
        self._stack = ExitStack()
        self._snapshot_requests = SnapshotRequests()
        self._served_snapshots: dict[str, int] = {}

    def __enter__(self) -> "Profiler":
        if self._config.profiling.enable_memory_snapshot:
            self._snapshot_requests = self._stack.enter_context(count_snapshot_signals())
            if is_cuda_device(self._device):
                self._stack.enter_context(_record_cuda_history(self._device))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def profile(self, step: int, name: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Run the block, which is step `step` (from 1) of the model `name`, and profile it if it is due.

        The files are written after the block. If it raises there are none, except for a snapshot when CUDA is out of
        memory.
        """
        with ExitStack() as stack:
            if self._config.profiling.enable_memory_snapshot:
                if is_cuda_device(self._device):
                    stack.enter_context(self._take_cuda_snapshot(step, name))
                else:
                    stack.enter_context(self._record_cpu_timeline(step, name, model, optimizer))
            stack.enter_context(self._trace(step, name))
            yield

    def is_traced(self, step: int) -> bool:
        """Return whether torch.profiler runs in the step, to write a trace or to warm up for one."""
        config = self._config.profiling
        window = config.profiler_warmup + config.profiler_active
        return config.enable_profiling and -step % config.profile_freq < window

    @contextmanager
    def _trace(self, step: int, name: str) -> Iterator[None]:
        if not self.is_traced(step):
            yield
            return
        config = self._config.profiling
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (is_cuda_device(self._device))
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        if -step % config.profile_freq < config.profiler_active:
            file = self._name_file(config.save_traces_folder, step, name, ".json.gz")
            self._write(file, partial(_export_trace, profiler))

    @contextmanager
    def _take_cuda_snapshot(self, step: int, name: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self._write_cuda_snapshot(step, name, "-out-of-memory.pickle")
            raise
        if self._is_snapshot_due(step, "all"):  # the allocator's history covers all models
            self._write_cuda_snapshot(step, name, ".pickle")

    def _write_cuda_snapshot(self, step: int, name: str, ending: str) -> None:
        file = self._name_file(self._config.profiling.save_memory_snapshot_folder, step, name, ending)
        self._write(file, lambda path: dump_snapshot(str(path)))

    @contextmanager
    def _record_cpu_timeline(self, step: int, name: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        if not self._is_snapshot_due(step, name):
            yield
            return
        with record_timeline(model, optimizer, persistent_scales=list_persistent_scales(model)) as timeline:
            yield
        report = timeline.report() | {"model": name, "step": step, "rank": self._rank, "config": asdict(self._config)}
        file = self._name_file(self._config.profiling.save_memory_snapshot_folder, step, name, ".json")
        title = f"{self._folder.name}: live tensors of {name}, step {step}, rank {self._rank}"

        text = json.dumps(report, allow_nan=False) + "\n"
        self._write(file, lambda path: path.write_text(text, encoding="utf-8"))
        self._write(file.with_suffix(".png"), lambda path: draw_timeline(report, path, title=title))

    def _is_snapshot_due(self, step: int, name: str) -> bool:
        """Return whether the config names this step, or a SIGUSR1 arrived after the last snapshot of `name`."""
        requested, served = self._snapshot_requests.count, self._served_snapshots.get(name, 0)
        self._served_snapshots[name] = requested
        return step == self._config.profiling.memory_snapshot_step or requested > served

    def _name_file(self, folder: str, step: int, name: str, ending: str) -> Path:
        return self._folder / folder / f"step-{step:06d}" / f"{make_file_name(name)}-rank{self._rank}{ending}"

    def _write(self, file: Path, write: Callable[[Path], object]) -> None:
        """Create the folders of `file` in the run folder and replace it; keep an error."""
        with self._failures.catch(), reraise_as_not_written(file):
            *folders, _ = file.relative_to(self._folder).parents  # not the run folder, which may have been removed
            for folder in reversed(folders):
                (self._folder / folder).mkdir(exist_ok=True)
            with replace_file(file) as partial_file:
                write(partial_file)


@contextmanager
def _record_cuda_history(device: torch.device) -> Iterator[None]:
    record_memory_history(max_entries=MAX_HISTORY_ENTRIES, device=device)
    try:
        yield
    finally:
        record_memory_history(enabled=None, device=device)


def _export_trace(profiler: profile, file: Path) -> None:
    """Write the trace to `file`, compressed. Raises OSError, also where torch's own writer only logs that it failed."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        if not _is_whole_trace(trace):
            raise OSError(f"torch.profiler wrote an incomplete trace to {folder!r}; is the disk full?")
        with trace.open("rb") as plain, gzip.open(file, "wb") as compressed:
            shutil.copyfileobj(plain, compressed)


def _is_whole_trace(trace: Path) -> bool:
    """Return whether the file of torch.profiler has its last entry, `"traceName": "..." }`."""
    if not trace.exists():
        return False
    with trace.open("rb") as file:
        file.seek(-min(trace.stat().st_size, len(str(trace)) + 64), os.SEEK_END)
        end = file.read()
    return b'"traceName"' in end and end.rstrip().endswith(b"}")


def list_persistent_scales(model: nn.Module) -> list[Tensor]:
    """Return every tensor of the persistent scales and histories that the linears of `model` share."""
    linear_slots = [module.scale_slots for module in model.modules() if isinstance(module, Float8Linear)]
    slots_by_id = {
        id(slots.conversion_slots): slots.conversion_slots
        for slots in linear_slots
        if isinstance(slots, LinearScaleSlots)
    }
    return [value for slots in slots_by_id.values() for value in vars(slots).values() if isinstance(value, Tensor)]
