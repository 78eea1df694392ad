"""The monitor of a run's model, and its record in numerics.jsonl, TensorBoard and Weights & Biases."""

from typing import Any

from quaver.lab.runs.errors import reraise_as_not_written
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.trainer.loggers import Loggers
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.numerics.monitoring import Monitor
from quaver.numerics.record import RecordWriter, Sink

LOGGED_STATISTICS = ("amax", "underflow", "saturated", "sqnr_db", "nonfinite")
"""The statistics that loggers show; numerics.jsonl has all of them."""


def open_monitor(trained: TrainedModel, sink: Sink | None, *, completed_steps: int) -> None:
    """Sample the numerics of `trained` from the next step on, as `config.numerics` says. A collective."""
    numerics = trained.config.numerics
    trained.monitor = Monitor(
        trained.model,
        every=numerics.every,
        extras_every=numerics.extras_every,
        emulate_sums_of=None if numerics.emulate_sums_of == "none" else numerics.emulate_sums_of,
        sink=sink,
        completed_steps=completed_steps,
        steps_by_hand=True,
    )


def close_monitor(trained: TrainedModel) -> None:
    """Close the monitor of `trained` if one is open."""
    if trained.monitor is not None:
        trained.monitor.close()
        trained.monitor = None


class NumericsLog:
    """The sink of a run's monitor."""

    def __init__(self, folder: RunFolder, loggers: Loggers) -> None:
        self._writer, self._loggers = RecordWriter(folder.numerics_path), loggers
        self._names: list[str] = []

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and log its numbers. Raises NotWrittenError."""
        with reraise_as_not_written(self._writer.path):
            self._writer.write(line)
        if line["kind"] == "header":
            self._names = [make_logger_name(tensor) for tensor in line["tensors"]]
        elif line["kind"] == "sample":
            scalars = {
                f"numerics/{statistic}/{name}": value
                for statistic in LOGGED_STATISTICS
                for name, value in zip(self._names, line[statistic], strict=True)
                if value is not None
            }
            self._loggers.log(line["step"], scalars)

    def close(self) -> None:
        """Close the record. The run closes the loggers."""
        self._writer.close()


def make_logger_name(tensor: dict[str, Any]) -> str:
    """Return a tensor's name in the loggers: LAYER.OPERAND, or LAYER.OPERAND.CAST if the operand has two casts."""
    cast = "" if tensor["cast"] in ("both", "result") else f".{tensor['cast']}"
    return f"{tensor['layer']}.{tensor['operand']}{cast}"
