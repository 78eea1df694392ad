"""What a run shows: a progress bar per twin on a terminal, plain lines elsewhere, and a table at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from quaver.trainer.records.device_memory import memory_words


@dataclass
class Display:
    """Shows steps as they end."""

    console: Console
    progress: Progress
    tasks: dict[str, TaskID]
    log_freq: int

    def line(self, text: str) -> None:
        """Print one line, above the bars where there are some, never wrapped or styled."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def step(self, record: dict[str, Any]) -> None:
        """Show the record of one training step."""
        numbers = (
            f"loss {record['loss']:.4f} grad norm {record['grad_norm']:.2f} "
            f"{record['tokens_per_s']:,.0f} tokens/s MFU {record['mfu']:.1%}"
        )
        self.progress.update(self.tasks[record["run"]], completed=record["step"], numbers=numbers)
        if record["loss_spike"]:
            self._of(record, f"loss {record['loss']:.4f} is a spike: far above the losses before it")
        if not self.console.is_terminal and record["step"] % self.log_freq == 0:
            self._of(
                record,
                f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.2f}  {memory_words(record)}  "
                f"{record['tokens_per_s']:,.0f} tokens/s  {record['tflops']:.3g} TFLOP/s  "
                f"MFU {record['mfu']:.1%} of the bfloat16 peak, {_share(record['mfu_by_precision'])} of the peaks of "
                "what ran",
            )

    def skipped(self, step: int, run: str, why: str) -> None:
        """Tell of a step that changed nothing."""
        self._of({"step": step, "run": run}, f"skipped: {why}")

    def validation(self, record: dict[str, Any]) -> None:
        """Show the record of one validation."""
        hp = f" ({record['validation_loss_hp']:.4f} without float8)" if "validation_loss_hp" in record else ""
        self._of(record, f"validation loss {record['validation_loss']:.4f}{hp}")

    def _of(self, record: dict[str, Any], text: str) -> None:
        self.line(f"step {record['step']:5d}  {record['run']:<18}  {text}")


@contextmanager
def training_display(names: Sequence[str], steps: int, log_freq: int, *, quiet: bool = False) -> Iterator[Display]:
    """Show progress bars for the twins `names` while the block runs; nothing where `quiet`."""
    console = Console(quiet=quiet)
    progress = Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=console,
        disable=quiet or not console.is_terminal,
        expand=True,
        refresh_per_second=2,  # drawing takes a core from the training for milliseconds
    )
    with progress:
        tasks = {name: progress.add_task(name, total=steps, numbers="") for name in names}
        yield Display(console, progress, tasks, log_freq)


def print_results(summary: dict[str, Any]) -> None:
    """Print the table of a finished run from its summary.json."""
    console = Console()
    runs = summary["runs"]
    table = Table(title=f"{summary['status']} after {summary['steps']} steps")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    rows: list[tuple[str, str, str]] = [
        ("validation loss (nats)", "validation_loss", "{:.4f}"),
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("TFLOP/s of a device", "tflops", "{:.3g}"),
        ("MFU of the bfloat16 peak", "mfu", "{:.1%}"),
        ("MFU of the peaks of what ran", "mfu_by_precision", "{:.1%}"),
        ("peak memory (bytes)", "peak_memory_bytes", "{:,}"),
    ]
    comparison = summary.get("comparison")
    if comparison:
        table.add_column("compared", justify="right")
    compared = {
        "validation_loss": ("loss_gap", "{:+.2%}"),
        "tokens_per_s": ("tokens_per_s_ratio", "{:.2f}x"),
        "peak_memory_bytes": ("peak_memory_ratio", "{:.2f}x"),
    }
    for label, key, style in rows:
        cells = [_cell(run[key], style) for run in runs.values()]
        if comparison:
            name, ratio_style = compared.get(key, ("", ""))
            cells.append(_cell(comparison.get(name), ratio_style) if name else "")
        table.add_row(label, *cells)
    console.print(table)
    sources = {run["peak_memory_source"] for run in runs.values()}
    console.print(f"peak memory: {'; '.join(sorted(sources))}", soft_wrap=True, highlight=False, markup=False)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _cell(value: Any, style: str) -> str:
    return "-" if value is None else style.format(value)
