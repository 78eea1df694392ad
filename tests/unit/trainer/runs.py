"""Runs of the trainer for tests: settings changed by section, a run to its end, and the numbers that it recorded."""

from dataclasses import replace
from typing import Any

from quaver.trainer.config import TrainConfig
from quaver.trainer.metrics import read_metrics
from quaver.trainer.train import Run, prepare, train


def changed(config: TrainConfig, **sections: dict[str, Any]) -> TrainConfig:
    """changed(config, training={"steps": 3}, job={"name": "short"}): the config with these settings."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def run_to_end(config: TrainConfig) -> Run:
    run = prepare(config)
    assert train(run)["status"] == "finished"
    return run


def numbers(run: Run) -> list[tuple[str, ...]]:
    """Losses and gradient norms of every step and model, and validation losses, sorted: models take turns."""
    keys = ("step", "run", "loss", "grad_norm", "validation_loss")
    return sorted(tuple(str(record.get(key)) for key in keys) for record in read_metrics(run.folder.metrics))
