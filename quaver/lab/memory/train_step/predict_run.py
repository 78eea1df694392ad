"""Predicts the memory of a run's training step without data, devices or memory.

The trainer's own code makes, converts, parallelizes and trains the model, with fake tensors. If the run has several
ranks, this process is the first one in torch's fake process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch.torch_version import TorchVersion

from quaver.lab.data import Batch
from quaver.lab.memory.faking.experts import EVEN_LOAD_NOTE, dispatch_tokens_evenly
from quaver.lab.memory.faking.fakes import FakeMode, fake_tensors
from quaver.lab.memory.predict_step import Prediction, record_fake_step
from quaver.lab.model.initialize import allocate
from quaver.lab.model.parallelize import ignore_view_warning, open_fake_mesh, parallelize
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.profiling import list_persistent_scales
from quaver.lab.trainer.run_setup import make_models
from quaver.lab.trainer.trained_model import TrainedModel

HAS_VISIBLE_RESIZES = TorchVersion(torch.__version__) >= "2.13"
"""Whether resizes of fake storages are visible. They are not in torch 2.11, and 2.12 was not tried."""

COMPARED_NOTE = "job.compare: the parameters and the optimizer state of the other model come on top"


@dataclass(frozen=True)
class RunMemory:
    """The memory of a training step of the run that `config` describes."""

    config: TrainConfig
    """The config with its global batch size filled in."""
    dims: ParallelDims
    name: str
    """The recipe, or the high-precision dtype."""
    parameters: int
    """The number of parameters of the whole model."""
    micro_batches: int
    """The number of microbatches in one rank's step."""
    prediction: Prediction
    """The prediction for the first rank, whose shards are the largest if they are uneven."""

    @property
    def notes(self) -> list[str]:
        """Differences between the run and what is predicted."""
        notes = [COMPARED_NOTE] if self.config.job.compare else []
        if self.dims.ep > 1:
            notes.append(EVEN_LOAD_NOTE)
        if self.config.float8.high_precision_schedule:
            notes.append("float8.high_precision_schedule: predicted for steps without the schedule")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        run = {"trained_in": self.name, "parameters": self.parameters, "mesh": self.dims.mesh}
        run |= {"ranks": self.dims.world_size, "micro_batches": self.micro_batches}
        return {**run, "config": asdict(self.config), "notes": self.notes, **self.prediction.to_dict()}


def predict_run_memory(config: TrainConfig, ranks: int = 1, device: str = "cpu") -> RunMemory:
    """Predict the memory of a training step of the first of `ranks` processes on "cpu" or "cuda" devices.

    With `job.compare` only the requested model is trained, and the other model's parameters are excluded. Code that the
    run compiles is predicted as compiled code (quaver/lab/memory/compiling/compiled.py).

    Raises:
        InputError, OSError: the run itself would refuse its model or its ranks.
        NotImplementedError: something cannot be predicted.
    """
    if ranks > 1 and not HAS_VISIBLE_RESIZES:
        raise NotImplementedError(
            f"memory on several ranks is predicted with torch 2.13 or newer, this is {torch.__version__}: here FSDP2's "
            "gathers into fake tensors are invisible; predict one rank, or update torch"
        )
    with fake_run(config, ranks, fake_tensors(device, compiled=config.training.compile)) as run:
        model = run.trained.model
        prediction = record_fake_step(
            run.train_step,
            model,
            run.trained.optimizer,
            run.fake_mode,
            persistent_scales=list_persistent_scales(model),
            run_first_step=partial(run.train_step, micro_batches=1),
        )
    return RunMemory(run.config, run.dims, run.trained.name, run.parameters, run.micro_batches, prediction)


@dataclass(frozen=True)
class FakeRun:
    """The first rank of a run with fake tensors: its model, and a function that trains one step."""

    config: TrainConfig
    """The config with its global batch size filled in."""
    dims: ParallelDims
    fake_mode: FakeMode
    trained: TrainedModel
    train_step: Callable[..., None]
    """Trains one step. Its argument `micro_batches` makes it shorter."""
    parameters: int
    micro_batches: int


@contextmanager
def fake_run(config: TrainConfig, ranks: int, fake_mode: AbstractContextManager[FakeMode]) -> Iterator[FakeRun]:
    """Make the model that the trainer makes on the first of `ranks` processes. `fake_mode` is on inside the block.

    Raises:
        InputError, OSError: the run itself would refuse its model or its ranks.
    """
    device = torch.device("cpu")
    config, dims = resolve_parallel_dims(config, rank=0, world_size=ranks)
    with open_fake_mesh(dims) as mesh, ignore_view_warning():
        name, model = make_models(config, device).first
        parameters = sum(parameter.numel() for parameter in model.parameters())
        parallelize(model, config, mesh)  # the mesh computes coordinates with real tensors
        dispatch_tokens_evenly(model)
        with fake_mode as mode:
            allocate(model, device)
            trained = TrainedModel(name, model, config, device, Ranks(0, 0, ranks))
            trained.precompute_scales()
            train_step, micro_batches = make_train_step(trained, config, dims)
            yield FakeRun(config, dims, mode, trained, train_step, parameters, micro_batches)


def with_depth(config: TrainConfig, n_layers: int) -> TrainConfig:
    """Return `config` with another number of blocks."""
    return replace(config, model=replace(config.model, n_layers=n_layers))


def make_train_step(trained: TrainedModel, config: TrainConfig, dims: ParallelDims) -> tuple[Callable[..., None], int]:
    """Return a function that trains one step, and the number of its microbatches on one rank.

    The function takes a smaller number of microbatches as an argument. All tokens belong to one document. Memory
    depends on the tokens only if ranks split experts. So tokens differ, which lets routers choose more evenly.
    """
    training, numbers = config.training, count(1)

    def make_batch() -> Batch:
        shape = training.local_batch_size, training.seq_len
        tokens = (torch.arange(prod(shape), device=trained.device) % config.model.vocab_size).view(shape)
        return Batch(tokens, tokens.clone(), torch.zeros_like(tokens) if config.data.document_mask else None)

    micro_batches = dims.count_micro_batches(training)
    batches = [make_batch() for _ in range(micro_batches)]

    def train_step(*, micro_batches: int = micro_batches) -> None:
        trained.train_step(next(numbers), batches[:micro_batches])

    return train_step, micro_batches
