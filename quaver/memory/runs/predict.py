"""What a run's training step would take of memory, found out without data, devices or memory.

The model is made, converted, parallelized and trained for two steps by the code of a run, with fake tensors and, for
more ranks than one, as the first of them in a process group whose collectives go nowhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from quaver.memory.faking.fakes import Fakes, fake_tensors
from quaver.memory.predict import Prediction, predict_step
from quaver.trainer.config import TrainConfig
from quaver.trainer.data import Batch
from quaver.trainer.dry_run import pretended_mesh
from quaver.trainer.initialize import allocate
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plan import make_models
from quaver.trainer.profiling.steps import kept_scales
from quaver.trainer.ranks import Ranks
from quaver.trainer.twin import Twin

SEES_GATHERS = TorchVersion(torch.__version__) >= "2.13"
"""Whether fake tensors' storages are seen that are emptied and filled again: not in torch 2.11; 2.12 was not tried."""


@dataclass(frozen=True)
class RunMemory:
    """A prediction of the run that `config` asks for."""

    config: TrainConfig
    """With its global batch size filled in."""
    layout: Layout
    name: str
    """Of what trains: a recipe, or the high-precision dtype."""
    parameters: int
    """Of the whole model."""
    micro_batches: int
    """Of a rank's step."""
    prediction: Prediction
    """Of the first rank's step, which has the most of uneven shards."""
    compiled: bool = False
    """Whether what the run compiles was compiled for the prediction, too."""

    @property
    def notes(self) -> list[str]:
        """What of the run is not predicted as it will be."""
        notes = []
        if self.config.training.compile and not self.compiled:
            notes.append("training.compile: predicted as eager code, which takes more")
        if self.config.job.compare:
            notes.append("job.compare: the parameters and the optimizer state of the other twin come on top")
        if self.config.float8.last_steps_high_precision:
            notes.append("float8.last_steps_high_precision: those steps are not predicted")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        about = {"trained_in": self.name, "parameters": self.parameters, "mesh": self.layout.mesh}
        counts = {"ranks": self.layout.world_size, "micro_batches": self.micro_batches}
        settings = {"config": asdict(self.config), "notes": self.notes}
        return {**about, **counts, **settings, **self.prediction.to_dict()}


def predict_memory(config: TrainConfig, ranks: int = 1) -> RunMemory:
    """Predict the memory of a training step of the first of `ranks` processes.

    With `job.compare` the run has two models; this is the step of the one that was asked for, without the other's
    parameters. What the run compiles is predicted as compiled code (quaver/memory/compiling/compiled.py).

    Raises:
        ValueError, OSError: what the run itself would refuse of its model and its ranks.
        NotImplementedError: what cannot be predicted.
    """
    check_ranks(ranks)
    config, layout = resolve(config, rank=0, world_size=ranks)
    device, compiled = torch.device("cpu"), config.training.compile
    name, model = next(iter(make_models(config, device).by_name.items()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with pretended_mesh(layout) as mesh:
        parallelize(model, config, mesh)  # where ranks stand in a mesh is computed with numbers
        with fake_tensors(compiled=compiled) as fakes:
            allocate(model, device)
            twin = Twin(name, model, config, device, Ranks(0, 0, ranks))
            batches = _batches(config, layout)
            prediction = _predict(twin, batches, fakes)
    return RunMemory(config, layout, name, parameters, len(batches), prediction, compiled)


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks that cannot be predicted here.

    Raises:
        NotImplementedError: there are several, and torch is too old.
    """
    if ranks > 1 and not SEES_GATHERS:
        raise NotImplementedError(
            f"memory on several ranks is predicted with torch 2.13 or newer, this is {torch.__version__}: here FSDP2's "
            "gathers into fake tensors go unseen; predict one rank, or update torch"
        )


def _predict(twin: Twin, batches: list[Batch], fakes: Fakes) -> Prediction:
    steps = count(1)

    def step() -> None:
        twin.train_step(next(steps), batches)

    return predict_step(step, twin.model, twin.optimizer, fakes, kept_scales=kept_scales(twin.model))


def _batches(config: TrainConfig, layout: Layout) -> list[Batch]:
    training = config.training
    number = layout.micro_batches(training)
    return [_batch(training.local_batch_size, training.seq_len, config.data.document_mask) for _ in range(number)]


def _batch(sequences: int, tokens: int, with_documents: bool) -> Batch:
    def numbers() -> Tensor:
        return torch.empty(sequences, tokens, dtype=torch.int64)

    return Batch(numbers(), numbers(), numbers() if with_documents else None)
