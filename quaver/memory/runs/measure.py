"""What a run's training step really takes of memory: the same report as a prediction's, from a step that is done.

The model is made, converted, parallelized and trained by the code of a run, on random tokens. After warm-up steps one
is recorded tensor by tensor (quaver.memory.record_timeline), and in another the allocator is read: it also counts what
operators allocate and free again, and it is the only one to see what compiled code does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from quaver.recorder.allocator import Usage, measure_usage
from quaver.devices import resolve_device
from quaver.memory import CATEGORIES
from quaver.memory.predict import Prediction, record_step
from quaver.trainer.config import TrainConfig, require
from quaver.trainer.data import Batch
from quaver.memory.runs.predict import RunMemory
from quaver.trainer.initialize import allocate, initialize
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.model import Llama
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plan import make_models
from quaver.trainer.profiling.steps import kept_scales
from quaver.trainer.ranks import Ranks
from quaver.trainer.twin import Twin

WARM_UP_STEPS = 2
"""The optimizer has its state after the first, and compiled code is compiled."""

MOST_RANKS = 8
"""Processes that are started on this machine at the most."""


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(RunMemory):
    """A measurement of the run that `config` asks for; `prediction` is what was recorded, not predicted."""

    device: str
    """cpu, or the GPU's name."""
    allocator_peak_bytes: int
    """What stays between steps and the most that a step allocates beside it, with what operators free themselves."""
    allocator_tensor_peak_bytes: int | None
    """The same without that (Note: scratch, in quaver/recorder/allocator.py); None on a GPU, which does not tell."""

    @property
    def notes(self) -> list[str]:
        """How it was measured."""
        notes = [f"measured on {self.device}, with random tokens; the first of {self.layout.world_size} ranks"]
        if not self.prediction.report["exact"]:
            notes.append("training.compile: the peak is the allocator's, which does not know what its tensors are for")
        if self.config.job.compare:
            notes.append("job.compare: the parameters and the optimizer state of the other twin come on top")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict: a prediction's keys, "device" and the allocator's."""
        peaks = (self.allocator_peak_bytes, self.allocator_tensor_peak_bytes)
        allocator = dict(zip(("allocator_peak_bytes", "allocator_tensor_peak_bytes"), peaks, strict=True))
        return {**super().to_dict(), "device": self.device, **allocator}


def measure_memory(config: TrainConfig, ranks: int = 1) -> MeasuredMemory:
    """Train a few steps on this machine and measure one: in this process, or as the first of several with gloo.

    With `job.compare` it is the model that was asked for, alone. Weights, gradients and optimizer state are really
    allocated, on the device of `training.device`.

    Raises:
        ValueError: what the run itself would refuse of its model and its ranks; more ranks than MOST_RANKS.
        NotImplementedError: several ranks on GPUs.
        MissingDeviceError: the device is not there.
    """
    device = resolve_device(config.training.device)
    resolved, layout = resolve(config, rank=0, world_size=ranks)
    if ranks == 1:
        return _measure(resolved, layout, Ranks(), device)
    if device.type == "cuda":
        raise NotImplementedError(
            f"expected one rank on a GPU, or --training.device cpu, got {ranks} ranks; for several GPUs start the run "
            "itself with torchrun and profiling.enable_memory_snapshot"
        )
    require(ranks <= MOST_RANKS, "--ranks", f"at most {MOST_RANKS} where a step is measured", ranks)
    make_models(resolved, device)  # refuses here what each rank would
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measure_rank, (config, ranks, folder), nprocs=ranks)
        found: MeasuredMemory = torch.load(Path(folder) / "measured", weights_only=False)
    return found


def _measure_rank(rank: int, config: TrainConfig, ranks: int, folder: str) -> None:
    """What each started process does; the first one writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        resolved, layout = resolve(config, rank=rank, world_size=ranks)
        measured = _measure(resolved, layout, Ranks(rank, rank, ranks), torch.device("cpu"))
        if rank == 0:
            torch.save(measured, Path(folder) / "measured")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(config: TrainConfig, layout: Layout, ranks: Ranks, device: torch.device) -> MeasuredMemory:
    name, model = next(iter(make_models(config, device).by_name.items()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dims = tuple(layout.mesh)
    mesh = init_device_mesh(device.type, tuple(layout.mesh.values()), mesh_dim_names=dims) if dims else None
    parallelize(model, config, mesh)
    allocate(model, device)
    initialize(model, config.training.seed)
    twin, batches = Twin(name, model, config, device, ranks), _batches(config, layout, device)
    steps = count(1)

    def step() -> None:
        twin.train_step(next(steps), batches)

    for _ in range(WARM_UP_STEPS):
        step()
    recorded = record_step(step, model, twin.optimizer, kept_scales=kept_scales(model))
    usage = _read_allocator(step, model, device)
    if not recorded.report["exact"]:
        recorded = _with_peak_of(recorded, usage)
    resident_bytes = recorded.resident_bytes
    tensors = usage.tensor_peak_bytes
    return MeasuredMemory(
        config,
        layout,
        name,
        parameters,
        len(batches),
        recorded,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        allocator_peak_bytes=resident_bytes + usage.peak_bytes,
        allocator_tensor_peak_bytes=None if tensors is None else resident_bytes + tensors,
    )


def _batches(config: TrainConfig, layout: Layout, device: torch.device) -> list[Batch]:
    """Random tokens, the same on every rank; each row is one document."""
    training = config.training
    shape = (training.local_batch_size, training.seq_len)
    generator = torch.Generator().manual_seed(training.seed)

    def tokens() -> Tensor:
        return torch.randint(config.model.vocab_size, shape, generator=generator).to(device)

    def documents() -> Tensor | None:
        return torch.zeros(shape, dtype=torch.int64, device=device) if config.data.document_mask else None

    number = layout.micro_batches(training)
    return [Batch(tokens(), tokens(), documents()) for _ in range(number)]


def _read_allocator(step: Callable[[], None], model: Llama, device: torch.device) -> Usage:
    with measure_usage(device, may_leave=True) as measured, _before_first_backward(measured.mark):
        step()
    return measured.usage


@contextmanager
def _before_first_backward(mark: Callable[[], None]) -> Iterator[None]:
    """Have `mark` called before the first `Tensor.backward` inside the block, of which there must be one."""
    backward = Tensor.backward

    def mark_once(self: Tensor, *args: Any, **kwargs: Any) -> None:
        Tensor.backward = backward  # type: ignore[method-assign]
        mark()
        backward(self, *args, **kwargs)

    Tensor.backward = mark_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]


def _with_peak_of(recorded: Prediction, usage: Usage) -> Prediction:
    """What was recorded of compiled code, which is what stays, with the allocator's peak."""
    # The recorder meets gradients when the optimizer does, and takes them for older than the step.
    stays = {**recorded.report["resident_bytes"], "gradients": 0}
    added = usage.peak_bytes if usage.tensor_peak_bytes is None else usage.tensor_peak_bytes
    report = {**recorded.report, "resident_bytes": stays, "peak_bytes": sum(stays.values()) + added, "peak_event": 0}
    return replace(recorded, report=report, kept_bytes=usage.kept_bytes)


def side_by_side(predicted: RunMemory, measured: RunMemory) -> list[dict[str, Any]]:
    """What was predicted beside what was measured, in bytes.

    Returns:
        Rows of "what" (a category at the peak, then "peak", "between steps" and "kept for the backward"),
        "predicted_bytes", "measured_bytes" and "ratio" (predicted / measured); None for what was not measured.
    """
    ours, theirs = predicted.prediction, measured.prediction
    known = theirs.by_category if theirs.report["exact"] else None
    rows = [
        _row(name.replace("_", " "), ours.by_category.get(name, 0), known.get(name, 0) if known is not None else None)
        for name in CATEGORIES
        if name in ours.by_category or name in theirs.by_category
    ]
    rows.append(_row("peak", ours.peak_bytes, theirs.peak_bytes))
    rows.append(_row("between steps", ours.resident_bytes, theirs.resident_bytes))
    rows.append(_row("kept for the backward", ours.kept_bytes, theirs.kept_bytes))
    return rows


def _row(what: str, predicted_bytes: int, measured_bytes: int | None) -> dict[str, Any]:
    ratio = predicted_bytes / measured_bytes if measured_bytes else None
    return {"what": what, "predicted_bytes": predicted_bytes, "measured_bytes": measured_bytes, "ratio": ratio}
