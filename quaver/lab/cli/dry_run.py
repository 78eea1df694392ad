"""`quaver train ... --dry-run [--ranks N]`: prints the plan of a run without training."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from quaver.lab.cli.run_config import load_config_and_warn
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.fields import RankCount, Settings, setting
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.lab.trainer.dry_run import DryRun, dry_run
from quaver.runtime.devices import MissingDeviceError, resolve_device


@dataclass(frozen=True)
class DryRunOptions(Settings):
    """Options of `quaver train --dry-run`."""

    dry_run: bool = setting(False, "Print the plan of the run, and train and write nothing.")
    ranks: RankCount | None = setting(None, "With --dry-run: processes of the run; by default those of torchrun, or 1.")

    def check(self) -> None:
        """Raise InputError for --ranks without --dry-run."""
        if not self.dry_run:
            hint = "start a run on many processes with torchrun"
            self.require_default("ranks", unless="--dry-run is given", hint=hint)


def plan_run(run_flags: list[str], ranks: int) -> DryRun:
    """Return the plan of `quaver train RUN_FLAGS` on `ranks` processes. Raises what `dry_run` raises for bad input."""
    config = load_config_and_warn(*parse_arguments(run_flags, DryRunOptions))
    with show_progress("planning the run"):
        return dry_run(config, ranks)


def iter_views(run: DryRun) -> Iterator[str | Table]:
    """Yield the model, steps and data of a run, its linears, and which weights are not in float8."""
    config, training = run.config, run.config.training
    sequences, files = format_count(training.step_batch_size, "sequence"), format_count(len(run.source.files), "file")
    steps, tokens = format_count(training.steps, "step"), format_count(run.tokens, "token")
    lines = {
        "model": f"{run.parameters:,} parameters in {training.dtype}, computed in {training.mixed_precision_param}",
        "step": f"{sequences} of {training.seq_len:,} = {format_count(training.step_tokens, 'token')}",
        "run": f"{steps}, {tokens}, {run.tokens * run.flops_per_token:.3g} FLOPs",
        "FLOPs": f"{run.flops_per_token:,} per token, forward and backward",
        "data": f"{config.data.path}: {files}, {run.source.total_bytes:,} bytes; not read",
        "tokenizer": run.tokenizer,
        "ranks": str(run.dims),
    }
    yield from (f"{name:<13}{text}" for name, text in lines.items())
    yield from _iter_linear_views(run)
    if run.conversion_report:
        yield run.conversion_report.summary()
        reasons = sorted({layer.reason for layer in run.conversion_report.skipped})
        if reasons:
            yield f"not in float8: {'; '.join(reasons)}"
    yield "nothing was trained or written; remove --dry-run to train"
    try:
        resolve_device(training.device)
    except MissingDeviceError as error:
        yield f"this machine cannot train it: {error}"


def _iter_linear_views(run: DryRun) -> Iterator[str | Table]:
    """Yield a table of the linears, and then the operand casts to which it refers by number."""
    rows = []
    schemes: dict[tuple[str, ...], int] = {}
    for linear, count in run.linears:
        shape = f"{linear.in_features:,} -> {linear.out_features:,}"
        operands = (f"{matmul:<13}{casts.replace('dynamic ', '')}" for matmul, casts in linear.operands.items())
        number = schemes.setdefault(tuple(operands), len(schemes) + 1)
        rows.append((linear.name, str(count), shape, f"({number})"))
    title = "Effective quantization (dynamic scaling unless stated)"
    columns = ("linear", "number", "in -> out", "matmuls")
    yield make_table(title, columns, rows=rows, wrapped=columns[:1], right=columns[1:2])
    for scheme, number in schemes.items():
        yield from (f"{label:<5}{casts}" for label, casts in zip((f"({number})", "", ""), scheme, strict=True))
