"""The numbers of a run's steps in TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from quaver.lab.runs.file_names import WANDB_ID_FILE
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Metrics, require
from quaver.lab.terminal.console import print_line
from quaver.lab.terminal.escape import print_to_stderr
from quaver.runtime.files import replace_file


class _TensorBoard:
    """Writes to files in a thread: `log` and `close` may raise an error of an earlier call."""

    def __init__(self, folder: Path, completed_steps: int) -> None:
        """Hide the records that an earlier start of the run has after `completed_steps`."""
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(log_dir=str(folder), purge_step=completed_steps + 1)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_TENSORBOARD_NAME, _WANDB_NAME = "TensorBoard", "Weights & Biases"


class _Wandb:
    """Sends to the service, which cannot remove records.

    If a resumed run repeats steps that the service has, `RunFolder.begin` removed the id, and a new run begins there.
    """

    def __init__(self, project: str, folder: Path, settings: dict[str, Any], resume_step: int | None) -> None:
        run_id, is_new = _load_or_create_wandb_id(folder)
        self._run = importlib.import_module("wandb").init(
            project=project, dir=str(folder), name=folder.name, id=run_id, resume="allow", config=settings
        )
        self._run.define_metric("*", step_metric="step")  # its own step counts the calls of log
        if is_new and resume_step is not None:
            print_line(f"{_WANDB_NAME}: a new run, {run_id}, begins after step {resume_step}")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


def _load_or_create_wandb_id(folder: Path) -> tuple[str, bool]:
    """Return the id under which a resumed run continues its curves, and whether it is new and was stored now.

    It is stored in the run folder, because runs in different folders may have the same name.
    """
    path = folder / WANDB_ID_FILE
    if path.exists() and (run_id := path.read_text(encoding="utf-8").strip()):
        return run_id, False
    run_id = uuid4().hex[:16]
    with replace_file(path) as partial:
        partial.write_text(run_id + "\n", encoding="utf-8")
    return run_id, True


class Loggers:
    """The open loggers of a run. A logger that raises is named on stderr and switched off; the run continues.

    The files of the run have the same numbers, and a service that is down must not end a run.
    """

    def __init__(self) -> None:
        self._open: dict[str, _TensorBoard | _Wandb] = {}

    def open(self, config: Metrics, folder: RunFolder, settings: dict[str, Any]) -> None:
        """Open the loggers that `config` enables.

        Args:
            settings: the resolved config, which Weights & Biases stores with the run.
        """
        if config.enable_tensorboard:
            with self._switch_off_on_error(_TENSORBOARD_NAME):
                tensorboard = _TensorBoard(folder.path / config.save_tb_folder, folder.resume_step or 0)
                self._open[_TENSORBOARD_NAME] = tensorboard
        if config.enable_wandb:
            with self._switch_off_on_error(_WANDB_NAME):
                self._open[_WANDB_NAME] = _Wandb(config.wandb_project, folder.path, settings, folder.resume_step)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers of a step."""
        for name, logger in list(self._open.items()):
            with self._switch_off_on_error(name):
                logger.log(step, scalars)

    def close(self) -> None:
        """Write what is buffered, and close the loggers."""
        for name, logger in list(self._open.items()):
            with self._switch_off_on_error(name):
                logger.close()

    @contextmanager
    def _switch_off_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the package may raise anything
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            print_to_stderr(f"the run goes on without {name}, which failed: {reason}")


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
        has_package = not getattr(config, f"enable_{name}") or importlib.util.find_spec(name) is not None
        hint = f"pip install 'quaver[{name}]'"
        require(has_package, f"metrics.enable_{name}", f"false without the package {name}", True, hint)
