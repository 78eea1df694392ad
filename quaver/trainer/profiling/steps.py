"""What [profiling] asks for, around single steps of training.

    with Profiling(config, run_folder, ranks, device) as profiling:
        ...
        with profiling.step(step, twin.name, twin.model, twin.optimizer):
            twin.train_step(step, batches)

writes, in the run folder and for each rank and twin,

    profile_trace/step-000010/tensorwise-rank0.json.gz         a trace of the step, for Perfetto
    memory_snapshot/step-000003/tensorwise-rank0.json, .png    CPU: its live tensors (quaver.memory)
    memory_snapshot/step-000003/tensorwise-rank0.pickle        CUDA: the allocator's history up to its end

docs/profiling.md describes the files. No rank waits for another here, and what one rank is asked it does alone.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quaver import Float8Linear
from quaver.recorder.draw import draw_timeline
from quaver.recorder.timeline import record_timeline
from quaver.scale_state import LinearScales
from quaver.trainer.config import TrainConfig
from quaver.trainer.errors import OutputError
from quaver.trainer.profiling.cuda_snapshots import recorded_history, write_snapshot
from quaver.trainer.profiling.memory_request import MemoryRequest, memory_request
from quaver.trainer.profiling.traces import traced
from quaver.trainer.ranks import Ranks


class Profiling:
    """Profiles the steps that the config names, and those that SIGUSR1 asks for; nothing where it names none."""

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks, device: torch.device) -> None:
        """`folder`: the run folder, on every rank."""
        self._config, self._folder, self._rank, self._device = config, folder, ranks.rank, device
        self._open = ExitStack()
        self._request = MemoryRequest()
        self._served: dict[str, int] = {}

    def __enter__(self) -> "Profiling":
        if self._config.profiling.enable_memory_snapshot:
            self._request = self._open.enter_context(memory_request())
            if self._device.type == "cuda":
                self._open.enter_context(recorded_history(self._device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    @contextmanager
    def step(self, step: int, twin: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Run the block, which is step `step` (from 1) of the twin of that name, and profile it if it is its turn.

        Writing takes place after the block. Of a block that raises nothing is written, but for a snapshot where CUDA
        was out of memory.

        Raises:
            OutputError: a file cannot be written.
        """
        with ExitStack() as stack:
            if self._config.profiling.enable_memory_snapshot:
                follow = self._cuda_snapshot if self._device.type == "cuda" else self._cpu_timeline
                stack.enter_context(follow(step, twin, model, optimizer))
            if self._is_profiled(step):
                stack.enter_context(self._trace(step, twin, model))
            yield

    def _is_profiled(self, step: int) -> bool:
        config = self._config.profiling
        return config.enable_profiling and self._steps_to_window_end(step) < config.profiler_warmup + self._active

    @property
    def _active(self) -> int:
        return self._config.profiling.profiler_active

    def _steps_to_window_end(self, step: int) -> int:
        return -step % self._config.profiling.profile_freq

    @contextmanager
    def _trace(self, step: int, twin: str, model: nn.Module) -> Iterator[None]:
        is_warmup = self._steps_to_window_end(step) >= self._active
        with traced(model, self._device) as profiler:
            yield
        if not is_warmup:
            file = self._file(self._config.profiling.save_traces_folder, step, twin, ".json.gz")
            with _output(file):
                profiler.export_chrome_trace(str(file))

    @contextmanager
    def _cuda_snapshot(self, step: int, twin: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self._write_snapshot(step, twin, "-out-of-memory.pickle")
            raise
        if self._is_snapshot_due(step, "all"):  # the allocator knows no twins
            self._write_snapshot(step, twin, ".pickle")

    def _write_snapshot(self, step: int, twin: str, ending: str) -> None:
        file = self._file(self._config.profiling.save_memory_snapshot_folder, step, twin, ending)
        with _output(file):
            write_snapshot(file)

    @contextmanager
    def _cpu_timeline(self, step: int, twin: str, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        if not self._is_snapshot_due(step, twin):
            yield
            return
        with record_timeline(model, optimizer, kept_scales=kept_scales(model)) as timeline:
            yield
        about = {"run": twin, "step": step, "rank": self._rank, "config": _plain(self._config)}
        report = {**timeline.report(), **about}
        file = self._file(self._config.profiling.save_memory_snapshot_folder, step, twin, ".json")
        with _output(file):
            file.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
            title = f"{self._folder.name}: live tensors of {twin}, step {step}, rank {self._rank}"
            draw_timeline(report, file.with_suffix(".png"), title=title)

    def _is_snapshot_due(self, step: int, twin: str) -> bool:
        """Whether it is the step of the config, or one was asked for that `twin` has not answered yet."""
        asked, served = self._request.count, self._served.get(twin, 0)
        self._served[twin] = asked
        return step == self._config.profiling.memory_snapshot_step or asked > served

    def _file(self, folder: str, step: int, twin: str, ending: str) -> Path:
        return self._folder / folder / f"step-{step:06d}" / f"{twin}-rank{self._rank}{ending}"


@contextmanager
def _output(file: Path) -> Iterator[None]:
    """Make the folder of `file`, which the block writes; turn an OSError into an OutputError that names it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {str(file)!r}: {error.strerror or error}") from error


def kept_scales(model: nn.Module) -> list[Tensor]:
    """All that stays from step to step for kept scales: every tensor of the states that the linears share."""
    scalings = [module.scaling for module in model.modules() if isinstance(module, Float8Linear)]
    states = {id(scaling.state): scaling.state for scaling in scalings if isinstance(scaling, LinearScales)}
    return [value for state in states.values() for value in vars(state).values() if isinstance(value, Tensor)]


def _plain(config: TrainConfig) -> Any:
    """The settings for JSON, which has no infinity: it and NaN as words."""
    return json.loads(json.dumps(asdict(config)), parse_constant=str)
