"""What `quaver memory` prints of a prediction: where and when its peak is, and what is alive then."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from quaver.cli.memory.options import Options
from quaver.memory import CATEGORIES
from quaver.memory.predict import Prediction
from quaver.memory.reports.pitfalls import inner_operator
from quaver.memory.runs.predict import RunMemory
from quaver.recorder.byte_sizes import unit_of
from quaver.recorder.rows import merged_layers

_DEVICES = {"cuda": "an NVIDIA GPU that multiplies float8", "cpu": "a CPU"}


class Printer:
    """Prints to one console what was asked for by `options`."""

    def __init__(self, console: Console, options: Options, device: str) -> None:
        self.console, self.options, self.device = console, options, device

    def line(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def run(self, memory: RunMemory) -> None:
        """Print a prediction: lines, a table of categories, and one of the largest tensors."""
        training, prediction = memory.config.training, memory.prediction
        mesh = " x ".join(f"{name} {size}" for name, size in memory.layout.mesh.items())
        self._about("model", f"{memory.parameters:,} parameters in {training.dtype}, trained in {memory.name}")
        self._about("ranks", f"{memory.layout.world_size}{': ' + mesh if mesh else ''}; what follows is of one")
        self._about("device", _DEVICES[self.device])
        batch = f"{memory.micro_batches} micro-batches of {training.local_batch_size} sequences of {training.seq_len:,}"
        self._about("step", f"{batch} tokens")
        self._about("peak", f"{_size(prediction.peak_bytes)}, in the {_moment(prediction)}")
        self._about("between", f"{_size(prediction.resident_bytes)} stay between steps")
        self._about("kept", f"{_size(prediction.kept_bytes)} are kept by the first forward for its backward")
        for note in (*memory.notes, *prediction.notes):
            self._about("note", note)
        self.console.print(_categories(prediction))
        if self.options.top:
            self.console.print(_rows(prediction, self.options.top))

    def difference(self, memory: RunMemory, other: RunMemory) -> None:
        """Print what two predictions have of each category at their peaks."""
        self.console.print(_difference(memory.prediction, other.prediction))

    def _about(self, name: str, text: str) -> None:
        self.line(f"{name:<11}{text}")


def _moment(prediction: Prediction) -> str:
    module = prediction.module_of_peak
    return f"{prediction.phase_of_peak} of {module or 'no module'}, by {prediction.operator_of_peak or 'nothing'}"


def _categories(prediction: Prediction) -> Table:
    table = Table(title="Alive at the peak")
    table.add_column("what")
    for column in ("bytes", unit_of(prediction.peak_bytes)[1], "share"):
        table.add_column(column, justify="right")
    for name, size_bytes in prediction.by_category.items():
        _add(table, prediction, size_bytes, name.replace("_", " "))
    _add(table, prediction, prediction.peak_bytes, "sum")
    return table


def _difference(prediction: Prediction, other: Prediction) -> Table:
    table = Table(title="Compared with the other run, at the peaks")
    table.add_column("what")
    for column in ("bytes", "bytes there", "difference", "ratio"):
        table.add_column(column, justify="right")
    here, there = prediction.by_category, other.by_category
    rows = {name: (here.get(name, 0), there.get(name, 0)) for name in CATEGORIES if name in here or name in there}
    rows["sum"] = prediction.peak_bytes, other.peak_bytes
    rows["kept for the backward"] = prediction.kept_bytes, other.kept_bytes
    for name, (ours, theirs) in rows.items():
        ratio = f"{theirs / ours:.3f}" if ours else ""
        table.add_row(name.replace("_", " "), f"{ours:,}", f"{theirs:,}", f"{theirs - ours:+,}", ratio)
    return table


def _rows(prediction: Prediction, top: int) -> Table:
    table = Table(title=f"The largest {top} of it; * is the number of a layer")
    for column in ("what", "module", "made by", "at", "in", "tensors"):
        table.add_column(column, overflow="fold", no_wrap=column in ("module", "at"))
    for column in ("bytes", unit_of(prediction.peak_bytes)[1], "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in merged_layers(prediction.at_peak)[:top]:
        tensors = f"{row['count']} x {row['dtype']} {row['shape']}" if row["dtype"] else str(row["count"])
        words = (
            row["category"].replace("_", " "),
            row["module"],
            inner_operator(row["operator"]),
            row["source"],
            row["phase"],
            tensors,
        )
        _add(table, prediction, row["bytes"], *words)
    return table


def _add(table: Table, prediction: Prediction, size_bytes: int, *words: str) -> None:
    share = f"{size_bytes / prediction.peak_bytes:.1%}"
    table.add_row(*words, f"{size_bytes:,}", f"{size_bytes / unit_of(prediction.peak_bytes)[0]:.3f}", share)


def _size(size_bytes: int) -> str:
    unit_bytes, unit = unit_of(size_bytes)
    return f"{size_bytes:,} bytes = {size_bytes / unit_bytes:.4g} {unit}"
