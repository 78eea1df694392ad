"""Output of a run: plain lines, and a table at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from quaver.lab.data.progress import Advance, CacheProgress
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.lab.terminal.console import make_stdout_console, print_line
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.tables import fit_table, make_table
from quaver.lab.trainer.memory import describe_memory


class ShownProgress(CacheProgress):
    """Prints what the cache of tokens does. Progress is a bar on a terminal and one line elsewhere."""

    def print_line(self, text: str) -> None:
        """Print `text` as one line on stdout."""
        print_line(text)

    @contextmanager
    def show_reading(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Show progress over `total_bytes` under `label` while the block runs."""
        console = make_stdout_console()
        is_file = not console.is_terminal
        if is_file:
            print_line(f"{label}: {total_bytes:,} bytes")
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, disable=is_file, refresh_per_second=2, transient=True) as bar:
            task = bar.add_task(label, total=total_bytes)
            yield lambda count: bar.advance(task, count)


@dataclass
class Display:
    """Prints training steps and validations."""

    console: Console
    log_freq: int
    peak_is_measured: bool

    def print_line(self, text: str) -> None:
        """Print one line, without wrapping or styles."""
        print_line(text, self.console)

    def print_step(self, record: dict[str, Any]) -> None:
        """Show the record of one training step."""
        loss = f"loss {record['loss']:.4f}"
        if record["loss_spike"]:
            self._print_line_of_step(record, f"{loss} is a spike: far above the previous losses")
        if record["step"] % self.log_freq == 0:
            norm, speed = f"grad norm {record['grad_norm']:.2f}", f"{record['tokens_per_s']:,.0f} tokens/s"
            tflops, utilization = f"{record['tflops']:.3g} TFLOP/s", self._describe_utilization(record)
            self._print_line_of_step(
                record, "  ".join((loss, norm, describe_memory(record), speed, tflops, utilization))
            )

    def print_skipped_step(self, step: int, model: str, reason: str) -> None:
        """Report a step that was skipped."""
        self._print_line_of_step({"step": step, "model": model}, f"skipped: {reason}")

    def print_validation(self, record: dict[str, Any]) -> None:
        """Show the record of one validation."""
        loss_hp = f" ({record['validation_loss_hp']:.4f} without float8)" if "validation_loss_hp" in record else ""
        self._print_line_of_step(record, f"validation loss {record['validation_loss']:.4f}{loss_hp}")

    def _describe_utilization(self, record: dict[str, Any]) -> str:
        """Return the MFU where a data sheet has the peak, else the share of the rates that matmuls reached here."""
        if not self.peak_is_measured:
            return f"MFU {record['mfu']:.1%}"
        share = record["mfu_by_precision"]
        return "" if share is None else f"{share:.1%} of a measured matmul"

    def _print_line_of_step(self, record: dict[str, Any], text: str) -> None:
        self.print_line(f"step {record['step']:5d}  {record['model']:<18}  {text}")


def print_results(summary: dict[str, Any]) -> None:
    """Print summary.json as a table: one column per model, and the comparison with the bfloat16 baseline."""
    console = make_stdout_console()
    models, comparison = summary["models"], summary.get("comparison")
    rows: list[tuple[str, str, Callable[[Any], str], str]] = [
        ("validation loss (nats)", "validation_loss", "{:.4f}".format, "loss_gap"),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format, "tokens_per_s_ratio"),
        ("TFLOP/s per device", "tflops", "{:.3g}".format, ""),
    ]
    if summary["bfloat16_peak"]["is_measured"]:
        rows.append(("share of a measured matmul", "mfu_by_precision", "{:.1%}".format, ""))
    else:
        rows.append(("MFU (bfloat16 peak)", "mfu", "{:.1%}".format, ""))
        rows.append(("MFU (peak of each matmul's precision)", "mfu_by_precision", "{:.1%}".format, ""))
    rows.append(("peak memory", "peak_memory_bytes", format_bytes, "peak_memory_ratio"))
    if any(model["skipped_steps"] for model in models.values()):
        rows.insert(0, ("skipped steps", "skipped_steps", "{:,}".format, ""))
    columns = [*models, *(["compared"] if comparison else [])]
    cells = []
    for label, key, format_value, ratio in rows:
        cells.append([label, *(_format_cell(model[key], format_value) for model in models.values())])
        if comparison:
            format_ratio = "{:+.2%}" if ratio == "loss_gap" else "{:.2f}x"
            cells[-1].append(_format_cell(comparison[ratio], format_ratio.format) if ratio else "")
    title = f"{summary['status']} after {format_count(summary['steps'], 'step')}"
    table = make_table(title, ("", *columns), rows=cells, wrapped=("",), right=columns)
    console.width = fit_table(table, console.width)
    console.print(table)
    sources = {model["peak_memory_source"] for model in models.values()}
    print_line(f"peak memory: {'; '.join(sorted(sources))}", console)


def _format_cell(value: Any, format_value: Callable[[Any], str]) -> str:
    return "-" if value is None else format_value(value)
