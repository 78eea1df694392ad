"""`quaver memory [CONFIG.toml] [--ranks N] [--against WORDS] [--top N] [--output FILE] [--section.field value ...]`."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quaver.bench.results import save, writable
from quaver.cli.bench.options import Parser, natural, positive
from quaver.cli.errors import bad_input
from quaver.memory import CATEGORIES
from quaver.memory.draw import UNITS
from quaver.memory.predict import Prediction
from quaver.memory.rows import merged_layers
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.trainer.predict_memory import RunMemory, predict_memory


def run(argv: list[str]) -> int:
    """Print what a training step would take and where, and write it as JSON; 0, or 2 for bad input."""
    options, words = _parser().parse_known_args(argv)
    with bad_input():
        output = writable(Path(options.output))
        memory = _predict(words, options.ranks)
        other = None if options.against is None else _predict(_other_words(words, options.against), options.ranks)
    console = Console(width=max(140, Console().width))
    _print(console, memory, options.top)
    if other is not None:
        _print(console, other, options.top)
        console.print(_comparison(memory.prediction, other.prediction, options.against))
    save(memory.to_dict() | ({} if other is None else {"against": other.to_dict()}), output)
    console.print(f"saved {output}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _predict(words: list[str], ranks: int) -> RunMemory:
    return predict_memory(load_config(*parse_arguments(words)), ranks)


def _other_words(words: list[str], against: str) -> list[str]:
    """The words of the run to compare with: flags over the same ones, or, beginning with a file, all of their own."""
    other = shlex.split(against)
    return [*words, *other] if not other or other[0].startswith("--") else other


def _parser() -> Parser:
    parser = Parser(
        "quaver memory",
        usage="quaver memory [CONFIG.toml] [--section.field value ...] [options]",
        description="Predict the memory of a run's training step on one rank, and say what is alive at its peak. "
        "Needs no GPU, no data and no memory: the step runs with fake tensors, as eager code on a CPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every flag of `quaver train` may be given; `quaver train --help` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=positive, default=1, help="processes of the run; this is about the first")
    parser.add_argument(
        "--against",
        metavar="WORDS",
        help='compare with other settings, as one word: "--float8.recipe_name rowwise", or "OTHER.toml --a.b c"',
    )
    parser.add_argument("--top", type=natural, default=12, help="rows of the largest tensors to print")
    parser.add_argument("--output", default="runs/memory.json", help="where the JSON goes")
    return parser


def _print(console: Console, memory: RunMemory, top: int) -> None:
    def line(name: str, text: str) -> None:
        console.print(f"{name:<11}{text}", highlight=False, markup=False, soft_wrap=True)

    training, prediction = memory.config.training, memory.prediction
    mesh = " x ".join(f"{name} {size}" for name, size in memory.layout.mesh.items())
    line("model", f"{memory.parameters:,} parameters in {training.dtype}, trained in {memory.name}")
    line("ranks", f"{memory.layout.world_size}{': ' + mesh if mesh else ''}; what follows is of one")
    batch = f"{memory.micro_batches} micro-batches of {training.local_batch_size} sequences of {training.seq_len:,}"
    line("step", f"{batch} tokens")
    line("peak", f"{_size(prediction.peak_bytes)}, in the {prediction.phase_of_peak} of {_place(prediction)}")
    line("between", f"{_size(prediction.resident_bytes)} stay between steps")
    line("kept", f"{_size(prediction.kept_bytes)} are kept by the first forward for its backward")
    for note in memory.notes:
        line("note", note)
    console.print(_categories(prediction))
    if top:
        console.print(_rows(prediction, top))


def _place(prediction: Prediction) -> str:
    module = prediction.module_of_peak
    return f"{module or 'no module'}, by {prediction.operator_of_peak}"


def _categories(prediction: Prediction) -> Table:
    table = Table(title="Alive at the peak")
    table.add_column("what")
    for column in ("bytes", _unit(prediction.peak_bytes)[1], "share"):
        table.add_column(column, justify="right")
    for name, size_bytes in prediction.by_category.items():
        _add(table, prediction, size_bytes, name.replace("_", " "))
    _add(table, prediction, prediction.peak_bytes, "sum")
    return table


def _comparison(prediction: Prediction, other: Prediction, against: str) -> Table:
    table = Table(title=f"Compared with {against}")
    table.add_column("at the peak")
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
    for column in ("what", "module", "made by", "in", "tensors"):
        table.add_column(column, overflow="fold", no_wrap=column == "module")
    for column in ("bytes", _unit(prediction.peak_bytes)[1], "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in merged_layers(prediction.at_peak)[:top]:
        tensors = f"{row['count']} x {row['dtype']} {row['shape']}" if row["dtype"] else str(row["count"])
        words = (row["category"].replace("_", " "), row["module"], _operator(row), row["phase"], tensors)
        _add(table, prediction, row["bytes"], *words)
    return table


def _operator(row: dict[str, Any]) -> str:
    """What made it, without the phase of float8 work that it was part of."""
    operator = row["operator"] or ""
    return operator.partition(" (")[2].removesuffix(")") or operator


def _add(table: Table, prediction: Prediction, size_bytes: int, *words: str) -> None:
    share = f"{size_bytes / prediction.peak_bytes:.1%}"
    table.add_row(*words, f"{size_bytes:,}", f"{size_bytes / _unit(prediction.peak_bytes)[0]:.3f}", share)


def _size(size_bytes: int) -> str:
    unit_bytes, unit = _unit(size_bytes)
    return f"{size_bytes:,} bytes = {size_bytes / unit_bytes:.4g} {unit}"


def _unit(size_bytes: int) -> tuple[int, str]:
    """The largest unit that `size_bytes` has one of."""
    return next((size, name) for size, name in UNITS if size_bytes >= size or size == 1)
