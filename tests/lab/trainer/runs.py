"""Changes settings of a config, runs the trainer to its end and returns the numbers that it recorded."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quaver.lab.model.parallelize import make_mesh
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.run_setup import make_models
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run

CONFIGS = Path(__file__).parents[3] / "train_configs"


def with_settings(config: TrainConfig, **sections: dict[str, Any]) -> TrainConfig:
    """Return `config` with other settings, as `with_settings(config, training={"steps": 3}, job={"name": "short"})`."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def run_to_end(config: TrainConfig) -> TrainingRun:
    run = prepare_run(config)
    assert train(run)["status"] == "finished"
    return run


def build_on_rank(config: TrainConfig, ranks: int) -> tuple[TrainedModel, ParallelDims]:
    """Return the one model of a run as this rank of so many holds it, with its first weights."""
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    config, dims = resolve_parallel_dims(config, rank=rank, world_size=ranks)
    device, mesh = torch.device("cpu"), make_mesh(dims, "cpu")
    name, model = make_models(config, device).first
    return TrainedModel.build(name, model, config, device, Ranks(rank, rank, ranks), mesh), dims


def hash_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below `folder`, and the names of its folders."""
    hashes = {}
    for path in folder.rglob("*"):
        hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return hashes


def read_steps(metrics: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Return the records of training steps; with `name` those of one model."""
    records = (record for record in read_json_lines(metrics) if record["kind"] == "step")
    return [record for record in records if name in (None, record["model"])]


def read_losses(metrics: Path, name: str | None = None) -> list[float]:
    return [record["loss"] for record in read_steps(metrics, name)]


def read_numbers(run: TrainingRun) -> list[tuple[str, ...]]:
    """Return losses and gradient norms of every step and model, and validation losses, sorted: models take turns."""
    keys = ("step", "model", "loss", "grad_norm", "validation_loss")
    return sorted(tuple(str(record.get(key)) for key in keys) for record in read_json_lines(run.folder.metrics_path))


def list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())
