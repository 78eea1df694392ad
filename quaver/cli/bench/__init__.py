"""`quaver bench VERB`: parses the options of a benchmark, runs it, saves its result and prints a table."""

import importlib
import os

from quaver.bench.options import BenchOptions
from quaver.bench.results import Result, save, table_of, title_of
from quaver.cli.console import make_table, wide_console
from quaver.cli.dispatch import find_verb
from quaver.cli.errors import EXIT_INTERRUPTED, bad_input
from quaver.trainer.config.flags import parse_options

VERBS = {
    "linear": "one linear, forward and backward",
    "roofline": "what float8 linears would gain on other GPUs, predicted",
    "cast": "casts to float8: bytes per second and per element, against a copy",
    "gemm": "the three matmuls of a linear: FLOP/s, float8 against bfloat16",
    "block": "a transformer block in training: time and memory of a step",
    "train": "steps of quaver train: time, tokens per second and memory per recipe",
    "host": "what a tiny linear costs the host: time, operations, kernels",
}

WIDTH = 160
"""Columns of the tables where the terminal has fewer."""


def run(argv: list[str]) -> int:
    """Run the benchmark that `argv` begins with; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints lines of its own
    usage = "quaver bench VERB [options]      quaver bench VERB --help"
    verb = find_verb(VERBS, argv, kind="benchmark", usage=usage)
    if isinstance(verb, int):
        return verb
    if verb in ("roofline", "train"):
        return importlib.import_module(f"{__name__}.{verb}").run(argv[1:])
    with bad_input():
        kind = getattr(importlib.import_module(f"quaver.bench.{verb}"), verb.capitalize())
        options = parse_options(kind, argv[1:], prog=f"quaver bench {verb}")
        options.prepare()
    return finish(options, options.measure())


def finish(options: BenchOptions, result: Result) -> int:
    """Save a result, print it as a table with a note below, and say where it was saved; 0, or 130 after Ctrl-C."""
    save(result, options.result_file)
    titles, rows = table_of(result["rows"], options.fields)
    console = wide_console(WIDTH)
    console.print(make_table(title_of(result), titles, rows=rows))
    console.print(options.note(result))
    console.print(f"saved {options.result_file}" + ("" if result["complete"] else ": interrupted, not complete"))
    return 0 if result["complete"] else EXIT_INTERRUPTED
