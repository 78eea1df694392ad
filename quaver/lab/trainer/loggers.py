"""The numbers of a run's steps in TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from quaver.export.folders import NotWrittenError
from quaver.lab.runs.errors import OutputFailures, convert_to_not_written
from quaver.lab.runs.file_names import WANDB_ID_FILE
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Metrics, require
from quaver.lab.terminal.console import print_line
from quaver.runtime.files import replace_file


class _TensorBoard:
    """Its methods raise NotWrittenError for any error. A thread writes: `log` may raise an error of an earlier call."""

    def __init__(self, folder: Path, completed_steps: int) -> None:
        """Hide the records that an earlier start of the run has after `completed_steps`."""
        self._name = f"TensorBoard in {str(folder)!r}"
        with _convert_errors(self._name):
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(log_dir=str(folder), purge_step=completed_steps + 1)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        with _convert_errors(self._name):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with _convert_errors(self._name):
            self._writer.close()


_WANDB_NAME = "Weights & Biases"


class _Wandb:
    """Its methods raise NotWrittenError for any error of the service.

    It cannot remove records. `RunFolder.begin` removes the id of a run with records that the resumed run takes again,
    which then begins a new run there.
    """

    def __init__(self, project: str, folder: Path, settings: dict[str, Any], resume_step: int | None) -> None:
        identity, is_new = _choose_wandb_id(folder)
        with _convert_errors(_WANDB_NAME):
            self._run = importlib.import_module("wandb").init(
                project=project, dir=str(folder), name=folder.name, id=identity, resume="allow", config=settings
            )
            self._run.define_metric("*", step_metric="step")  # its own step counts the calls of log
        if is_new and resume_step is not None:
            print_line(f"{_WANDB_NAME}: a new run, {identity}, begins after step {resume_step}")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        with _convert_errors(_WANDB_NAME):
            self._run.log({**scalars, "step": step})

    def close(self) -> None:
        with _convert_errors(_WANDB_NAME):
            self._run.finish()


def _choose_wandb_id(folder: Path) -> tuple[str, bool]:
    """Return the id under which a resumed run continues its curves, and whether it is new and was stored now.

    It is stored in the run folder, because runs in different folders may have the same name. Raises NotWrittenError.
    """
    path = folder / WANDB_ID_FILE
    with convert_to_not_written(path):
        if path.exists() and (identity := path.read_text(encoding="utf-8").strip()):
            return identity, False
        identity = uuid4().hex[:16]
        with replace_file(path) as partial:
            partial.write_text(identity + "\n", encoding="utf-8")
        return identity, True


@contextmanager
def _convert_errors(logger: str) -> Iterator[None]:
    """Turn any error of the block into a NotWrittenError of one line, which `OutputFailures.catch` keeps."""
    try:
        yield
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise NotWrittenError(f"{logger}: {type(error).__name__}: {first_line}") from error


Logger = _TensorBoard | _Wandb


def list_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return every number of `record` except the step, keyed by `<model>/<name>`."""
    return {
        f"{record['model']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def check_loggers(config: Metrics) -> None:
    """Raise InputError if the package of an enabled logger is not installed."""
    for name in ("tensorboard", "wandb"):
        is_installed = not getattr(config, f"enable_{name}") or importlib.util.find_spec(name) is not None
        hint = f"pip install 'quaver[{name}]'"
        require(is_installed, f"metrics.enable_{name}", f"false without the package {name}", True, hint)


@contextmanager
def open_loggers(
    config: Metrics, folder: RunFolder, settings: dict[str, Any], failures: OutputFailures
) -> Iterator[list[Logger]]:
    """Open the loggers that `config` enables, and close them after the block.

    Raises NotWrittenError if one cannot be opened.

    Args:
        settings: the resolved config, which Weights & Biases stores with the run.
        failures: keeps the errors of closing them.
    """
    loggers: list[Logger] = []
    try:
        if config.enable_tensorboard:
            loggers.append(_TensorBoard(folder.path / config.save_tb_folder, folder.resume_step or 0))
        if config.enable_wandb:
            loggers.append(_Wandb(config.wandb_project, folder.path, settings, folder.resume_step))
        yield loggers
    finally:
        for logger in loggers:
            with failures.catch():
                logger.close()
