"""Measures the memory of a run's training step on this machine, in the form of a prediction.

The trainer's own code makes, converts, parallelizes and trains the model. After warm-up steps one step is recorded
tensor by tensor (`quaver.lab.recorder`), and another is measured in the allocator (quaver/lab/recorder/allocator.py).
The allocator also counts operators' scratch. Only it sees the inside of compiled code and the buffers of gloo.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from quaver.lab.data import Batch
from quaver.lab.memory.predict_step import Prediction, record_step
from quaver.lab.memory.train_step.predict_run import COMPARED_NOTE, RunMemory, make_train_step
from quaver.lab.model.parallelize import ignore_view_warning, make_mesh
from quaver.lab.recorder.allocator import Usage, measure_usage
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import TrainConfig, require
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.profiling import list_persistent_scales
from quaver.lab.trainer.run_setup import make_models
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.runtime.devices import is_cuda_device, resolve_device

STEPS_BEFORE_MEASURING = 2
"""After the first step the optimizer has its state, and code is compiled."""

MAX_RANKS = 8
"""The most processes that are started on this machine."""


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(RunMemory):
    """The measured memory of a training step. `prediction` is the recording."""

    device: str
    """cpu, or the GPU's name."""
    allocator_peak_bytes: int
    """The resident bytes plus the most that a step allocates on top, operators' scratch included."""
    allocator_tensor_peak_bytes: int | None
    """`allocator_peak_bytes` without scratch, see [Note: scratch] in recorder/allocator.py; None on a GPU."""

    @property
    def peak_bytes(self) -> int:
        """The recording's peak, or on several ranks the allocator's, since a recording lacks the buffers of gloo."""
        allocated = self.allocator_tensor_peak_bytes
        return self.prediction.peak_bytes if allocated is None or self.dims.world_size == 1 else allocated

    @property
    def notes(self) -> list[str]:
        """How the memory was measured."""
        notes = [f"measured on {self.device}; the first of {self.dims.world_size} ranks"]
        if self.dims.world_size > 1:
            notes.append("the peak is the allocator's, with gloo's buffers")
            notes.append("gloo's threads free some buffers late, which adds to the peak and to saved activations")
        if not self.prediction.report["exact"]:
            notes.append("training.compile: the peak is the allocator's, which has no categories")
        if self.config.job.compare:
            notes.append(COMPARED_NOTE)
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON: a prediction's keys, "device" and the allocator's peaks."""
        names = ("device", "allocator_peak_bytes", "allocator_tensor_peak_bytes")
        return {**super().to_dict(), **{name: getattr(self, name) for name in names}}


def measure_memory(config: TrainConfig, ranks: int = 1) -> MeasuredMemory:
    """Train a few steps on this machine and measure one, in this process or in several with gloo.

    Of several processes the first is measured. With `job.compare` only the requested model is trained. Weights,
    gradients and optimizer state are allocated on `training.device`.

    Raises:
        InputError: the run itself would refuse its model or its ranks, or there are more ranks than MAX_RANKS.
        NotImplementedError: several ranks on GPUs.
        MissingDeviceError: the device is missing.
    """
    device = resolve_device(config.training.device)
    resolved, dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
    if ranks == 1:
        return measure_rank(resolved, dims, Ranks(), device)
    if is_cuda_device(device):
        raise NotImplementedError(
            f"expected one rank on a GPU, or --training.device cpu, got {ranks} ranks; for several GPUs start the run "
            "itself with torchrun and profiling.enable_memory_snapshot"
        )
    require(ranks <= MAX_RANKS, "--ranks", f"at most {MAX_RANKS} where a step is measured", ranks)
    make_models(resolved, device)  # raises errors of the model here, before processes start
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measure_rank, (config, ranks, folder), nprocs=ranks)
        measured: MeasuredMemory = torch.load(Path(folder) / "measured", weights_only=False)
    return measured


def _measure_rank(rank: int, config: TrainConfig, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        resolved, dims = resolve_parallel_dims(config, rank=rank, world_size=ranks)
        with ignore_view_warning():
            measured = measure_rank(resolved, dims, Ranks(rank, rank, ranks), torch.device("cpu"))
        if rank == 0:
            torch.save(measured, Path(folder) / "measured")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _MarkedModel(TrainedModel):
    """A TrainedModel that calls `mark` once, when the backward of its first loss begins."""

    mark: Callable[[], None] | None = None

    def compute_loss(self, batch: Batch) -> Tensor:
        loss = super().compute_loss(batch)
        mark, self.mark = self.mark, None
        if mark is not None:
            loss.register_hook(lambda _: mark())
        return loss


def measure_rank(config: TrainConfig, dims: ParallelDims, ranks: Ranks, device: torch.device) -> MeasuredMemory:
    """Build the model of one rank, run its steps, and return what the allocator measured."""
    name, model = make_models(config, device).first
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = _MarkedModel.build(name, model, config, device, ranks, make_mesh(dims, device.type))
    train_step, micro_batches = make_train_step(trained, config, dims)
    for _ in range(STEPS_BEFORE_MEASURING):
        train_step()
    recorded = record_step(train_step, model, trained.optimizer, persistent_scales=list_persistent_scales(model))
    with measure_usage(device, allow_leftover=True) as measured:
        trained.mark = measured.mark
        train_step()
    usage = measured.usage
    if not recorded.report["exact"]:
        recorded = _replace_peak(recorded, usage)
    resident, tensors = recorded.resident_bytes, usage.tensor_peak_bytes
    return MeasuredMemory(
        config,
        dims,
        name,
        parameters,
        micro_batches,
        recorded,
        device=torch.cuda.get_device_name(device) if is_cuda_device(device) else "cpu",
        allocator_peak_bytes=resident + usage.peak_bytes,
        allocator_tensor_peak_bytes=None if tensors is None else resident + tensors,
    )


def _replace_peak(recorded: Prediction, usage: Usage) -> Prediction:
    """Add the allocator's peak to the recording of compiled code, which has only resident bytes."""
    # The recorder first sees gradients in the optimizer's step, and counts them as older than the recording.
    resident = {**recorded.report["resident_bytes"], "gradients": 0}
    peak_bytes = usage.peak_bytes if usage.tensor_peak_bytes is None else usage.tensor_peak_bytes
    peak_bytes += sum(resident.values())
    report = {**recorded.report, "resident_bytes": resident, "peak_bytes": peak_bytes, "peak_event": 0}
    return replace(recorded, report=report, saved_by_forward_bytes=usage.saved_bytes)


def tabulate_side_by_side(predicted: RunMemory, measured: MeasuredMemory) -> list[dict[str, Any]]:
    """Tabulate predicted and measured bytes.

    Returns:
        Rows of "what" (a category at the peak, then "peak", "between steps" and "saved for backward"),
        "predicted_bytes", "measured_bytes" and "ratio" (predicted / measured). The last two are None if nothing was
        measured.
    """
    prediction, recording = predicted.prediction, measured.prediction
    known = recording.by_category if recording.report["exact"] else None
    rows = [
        _make_row(
            name.replace("_", " "),
            prediction.by_category.get(name, 0),
            known.get(name, 0) if known is not None else None,
        )
        for name in CATEGORIES
        if name in prediction.by_category or name in recording.by_category
    ]
    rows.append(_make_row("peak", prediction.peak_bytes, measured.peak_bytes))
    rows.append(_make_row("between steps", prediction.resident_bytes, recording.resident_bytes))
    rows.append(_make_row("saved for backward", prediction.saved_by_forward_bytes, recording.saved_by_forward_bytes))
    return rows


def _make_row(name: str, predicted_bytes: int, measured_bytes: int | None) -> dict[str, Any]:
    ratio = predicted_bytes / measured_bytes if measured_bytes else None
    return {"what": name, "predicted_bytes": predicted_bytes, "measured_bytes": measured_bytes, "ratio": ratio}
