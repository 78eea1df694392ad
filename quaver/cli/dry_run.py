"""`quaver train ... --dry-run [--ranks N]`: the plan of a run, which is not trained."""

from dataclasses import dataclass

from rich.table import Table

from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import MostRanks, Settings, setting
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.dry_run import DryRun, dry_run


@dataclass(frozen=True)
class DryRunOptions(Settings):
    """Options of `quaver train --dry-run`."""

    dry_run: bool = setting(False, "Print the plan of the run, and train and write nothing.")
    ranks: MostRanks = setting(1, "With dry_run: processes of the run.")


def print_dry_run(words: list[str], ranks: int) -> int:
    """Print what `quaver train` with `words` would be on `ranks` processes; 0, or 2 for bad input."""
    with bad_input():
        result = dry_run(load_config(*parse_arguments(words)), ranks)
    _print(result)
    return 0


def _print(run: DryRun) -> None:
    console = wide_console(120)

    def line(name: str, text: str) -> None:
        console.print(f"{name:<13}{text}", soft_wrap=True)

    config, training = run.config, run.config.training
    line("model", f"{run.parameters:,} parameters in {training.dtype}, computed in {training.mixed_precision_param}")
    line("step", f"{training.step_batch_size} sequences of {training.seq_len:,} = {training.step_tokens:,} tokens")
    line("run", f"{training.steps:,} steps, {run.tokens:,} tokens, {run.tokens * run.flops_per_token:.3g} FLOPs")
    line("FLOPs", f"{run.flops_per_token:,} per token, forward and backward")
    line("data", f"{config.data.path}: {len(run.source.files):,} files, {run.source.total_bytes:,} bytes; not read")
    line("tokenizer", run.tokenizer)
    line("ranks", str(run.layout))
    console.print(_held_table(run))
    console.print(_linears_table(run))
    if run.report:
        console.print(run.report.summary())
        reasons = sorted({layer.reason for layer in run.report.skipped})
        if reasons:
            console.print(f"not in float8: {'; '.join(reasons)}")
    line("", "nothing was trained or written; remove --dry-run to train")


def _held_table(run: DryRun) -> Table:
    held = run.held
    sizes = {
        f"parameters, {run.config.training.dtype}": held.parameters,
        "gradients": held.gradients,
        f"{run.config.optimizer.name}'s moments": held.optimizer,
        "sum": held.total,
    }
    rows = [(name, f"{size:,}", f"{size / 2**30:.2f}") for name, size in sizes.items()]
    title, numbers = (
        "What each rank holds, without gathered weights and activations",
        ("bytes", "GiB"),
    )
    return make_table(title, ("", *numbers), rows=rows, right=numbers)


def _linears_table(run: DryRun) -> Table:
    title = "Effective quantization: the operands of each matmul (scaled dynamically unless it says how)"
    rows = []
    for linear, count in run.linears:
        shape = f"{linear.in_features:,} -> {linear.out_features:,}"
        # one line per operand
        operands = (each.replace("dynamic ", "").replace(" x ", "\nx ") for each in linear.operands.values())
        rows.append((linear.name, str(count), shape, *operands))
    return make_table(title, ("linear", "number", "in -> out", "output", "grad_input", "grad_weight"), rows=rows)
