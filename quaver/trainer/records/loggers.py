"""The two other places that a run's numbers can go to beside metrics.jsonl: TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from quaver.trainer.config import Metrics


class Logger(Protocol):
    """Takes the records of metrics.jsonl."""

    def write(self, record: dict[str, Any]) -> None:
        """Log the numbers of `record`, each under the name of its model."""


def check_loggers(config: Metrics) -> None:
    """Raise ValueError if a logger is asked for whose package is not installed."""
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config, f"enable_{name}") and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"metrics.enable_{name} must be false without the package {package}, got true; "
                f"pip install 'quaver[{name}]'"
            )


@contextmanager
def loggers(config: Metrics, folder: Path | None, settings: dict[str, Any]) -> Iterator[list[Logger]]:
    """Have the loggers that `config` asks for inside the block; none without a folder, as on ranks after the first.

    Args:
        settings: the resolved config, logged with the run.
    """
    opened: list[_TensorBoard | _Wandb] = []
    try:
        if folder is not None and config.enable_tensorboard:
            opened.append(_TensorBoard(folder / config.save_tb_folder))
        if folder is not None and config.enable_wandb:
            opened.append(_Wandb(config.wandb_project, folder, settings))
        yield list(opened)
    finally:
        for each in opened:
            each.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, folder: Path, settings: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        # The id makes a run that goes on from a checkpoint the same run there.
        self._run = wandb.init(
            project=project, dir=str(folder), name=folder.name, id=folder.name, resume="allow", config=settings
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log({**_numbers(record), "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """By `<model>/<name>`, every number of `record` but the step."""
    return {
        f"{record['run']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }
