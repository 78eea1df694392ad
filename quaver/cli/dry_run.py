"""`quaver train ... --dry-run [--ranks N]`: the plan of a run, which is not trained."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from quaver.cli.errors import bad_input
from quaver.trainer.config.flags import split_flags
from quaver.trainer.config.settings import AtLeast1, Settings
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.dry_run import DryRun, dry_run


@dataclass(frozen=True)
class DryRunOptions(Settings):
    """Options of `quaver train --dry-run`."""

    dry_run: bool = False
    """Print the plan of the run, and train and write nothing."""
    ranks: AtLeast1 = 1
    """With --dry-run: processes of the run."""


def dry_run_verb(argv: list[str]) -> int:
    """Print what `quaver train` with the other words of `argv` would be; 0, or 2 for bad input."""
    with bad_input():
        values, words = split_flags(DryRunOptions, argv)
        result = dry_run(load_config(*parse_arguments(words)), DryRunOptions(**values).ranks)
    _print(result)
    return 0


def _print(run: DryRun) -> None:
    console = Console(width=max(120, Console().width))

    def line(name: str, text: str) -> None:
        console.print(f"{name:<13}{text}", highlight=False, markup=False, soft_wrap=True)

    config, training = run.config, run.config.training
    line("model", f"{run.parameters:,} parameters in {training.dtype}, computed in {training.mixed_precision_param}")
    line("step", f"{training.step_batch_size} sequences of {training.seq_len:,} = {training.step_tokens:,} tokens")
    line("run", f"{training.steps:,} steps, {run.tokens:,} tokens, {run.tokens * run.flops_per_token:.3g} FLOPs")
    line("FLOPs", f"{run.flops_per_token:,} per token, forward and backward")
    line("data", f"{config.data.path}: {len(run.source.files):,} files, {run.source.total_bytes:,} bytes; not read")
    line("tokenizer", run.tokenizer)
    mesh = " x ".join(f"{name} {size}" for name, size in run.layout.mesh.items())
    line("ranks", f"{run.layout.world_size}{': ' + mesh if mesh else ''}")
    _print_held(console, run)
    _print_linears(console, run)
    line("", "nothing was trained or written; leave --dry-run out to begin")


def _print_held(console: Console, run: DryRun) -> None:
    table = Table(title="What each rank holds, without activations and temporaries")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("GiB", justify="right")
    held = run.held
    rows = {
        f"parameters, {run.config.training.dtype}": held.parameters,
        "gradients": held.gradients,
        "AdamW's moments": held.optimizer,
        "weights that FSDP2 gathered": held.gathered,
        "sum": held.total,
    }
    for name, size in rows.items():
        table.add_row(name, f"{size:,}", f"{size / 2**30:.2f}")
    console.print(table)


def _print_linears(console: Console, run: DryRun) -> None:
    table = Table(title="Effective quantization: the operands of each matmul (scaled dynamically unless it says how)")
    for column in ("linear", "number", "in -> out", "output", "grad_input", "grad_weight"):
        table.add_column(column, no_wrap=True)
    for linear, count in run.linears:
        shape = f"{linear.in_features:,} -> {linear.out_features:,}"
        table.add_row(linear.name, str(count), shape, *(_short(each) for each in linear.operands.values()))
    console.print(table)
    if run.report:
        console.print(run.report.summary(), highlight=False)
        reasons = sorted({layer.reason for layer in run.report.skipped})
        if reasons:
            console.print(f"not in float8: {'; '.join(reasons)}", highlight=False, markup=False)


def _short(operands: str) -> str:
    """The two operands of a matmul on lines of their own."""
    return operands.replace("dynamic ", "").replace(" x ", "\nx ")
