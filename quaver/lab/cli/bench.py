"""`quaver bench VERB`: parses the options of a benchmark, runs it, saves its result and prints a table."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

from rich.table import Table

from quaver.lab.bench.block import BlockBenchmark
from quaver.lab.bench.cast import CastBenchmark
from quaver.lab.bench.gemm import GemmBenchmark
from quaver.lab.bench.host import HostBenchmark
from quaver.lab.bench.linear import LinearBenchmark
from quaver.lab.bench.options import BenchOptions
from quaver.lab.bench.results import Result, UnfinishedError, format_table, format_title, group_cases
from quaver.lab.bench.train import TrainBenchmark
from quaver.lab.cli.dispatch import find_verb
from quaver.lab.cli.errors import EXIT_NONFINITE, print_error, report_bad_input
from quaver.lab.cli.run_config import load_config_and_warn
from quaver.lab.output_file import write_result
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.flags import parse_options, split_options
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.tables import make_table
from quaver.lab.trainer.nonfinite import NonFiniteError

VERBS = {
    "linear": "one linear, forward and backward",
    "roofline": "what float8 linears would gain on other GPUs, predicted",
    "cast": "casts to float8: bytes per second and per element, against a copy",
    "gemm": "the three matmuls of a linear: FLOP/s, float8 against bfloat16",
    "ledger": "what one compiled block does on a GPU, counted without one",
    "block": "a transformer block in training: time and memory of a step",
    "train": "steps of quaver train: time and memory per recipe",
    "host": "what a tiny linear costs the host: time, operations, kernels",
}

TIMED: dict[str, type[Any]] = {
    "linear": LinearBenchmark,
    "cast": CastBenchmark,
    "gemm": GemmBenchmark,
    "block": BlockBenchmark,
    "train": TrainBenchmark,
    "host": HostBenchmark,
}
"""The benchmarks that measure on this machine."""


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` begins with, save its result, and print it as a table with a note below.

    Returns:
        0 when done, 2 for bad input, 3 for a non-finite loss, 130 after Ctrl-C.
    """
    usage = "quaver bench VERB [options]      quaver bench VERB --help"
    verb = find_verb(VERBS, argv, kind="benchmark", usage=usage)
    return BENCHMARKS[verb](argv[1:])


def _run_module(name: str, argv: list[str]) -> int:
    """Run a benchmark whose file is imported on use, because it imports Inductor or matplotlib."""
    return importlib.import_module(f"quaver.lab.cli.{name}").main(argv)


def _run(prepare: Callable[[list[str]], tuple[BenchOptions, Callable[[], Result]]], argv: list[str]) -> int:
    with report_bad_input():
        options, measure = prepare(argv)
    try:
        _measure_and_save(options, measure)
    except NonFiniteError as error:
        print_error(error)
        return EXIT_NONFINITE
    return 0


def _measure_and_save(options: BenchOptions, measure: Callable[[], Result]) -> None:
    """Measure, save and print the result. An error that ends the benchmark is raised after its rows are saved."""
    error = None
    try:
        with report_bad_input():
            result = measure()
    except UnfinishedError as unfinished:
        result, error = unfinished.result, unfinished.cause
    write_result(result, options.result_file)
    print_views(iter_views(options, result))
    if error is not None:
        with report_bad_input():
            raise error


def iter_views(options: BenchOptions, result: Result) -> Iterator[str | Table]:
    """Yield the tables of a result, what they say, and where it was saved."""
    yield format_title(result)
    for case, case_rows in group_cases(result["rows"], options.case_fields):
        for title, fields in zip_longest((case,), options.tables):
            names, rows = format_table(case_rows, fields)
            yield make_table(title, names, rows=rows, wrapped=names[:1])
    yield options.format_note(result)
    yield f"saved {options.result_file}" + ("" if result["complete"] else ": not complete")


def _prepare(verb: str, argv: list[str]) -> tuple[BenchOptions, Callable[[], Result]]:
    """Parse and prepare the options of a benchmark. Return them, and the function that measures."""
    options = parse_options(TIMED[verb], argv, prog=f"quaver bench {verb}")
    options.prepare()
    return options, options.measure


def _prepare_training(argv: list[str]) -> tuple[BenchOptions, Callable[[], Result]]:
    """Parse the options of `quaver bench train` and the flags of its run, as `_prepare` does."""
    options, run_argv = split_options(TrainBenchmark, argv, prog="quaver bench train [CONFIG.toml]")
    path, flags = parse_arguments(run_argv, TrainBenchmark, prog="quaver bench train")
    if options.device != "auto":
        flags.setdefault("training", {})["device"] = options.device
    config = load_config_and_warn(path, flags)
    options.prepare()
    return options, partial(options.measure_steps, options.set_up(config))


BENCHMARKS: dict[str, Callable[[list[str]], int]] = {
    **{verb: partial(_run, partial(_prepare, verb)) for verb in TIMED},
    "train": partial(_run, _prepare_training),
    "roofline": partial(_run_module, "bench_roofline"),
    "ledger": partial(_run_module, "bench_ledger"),
}
"""The function that runs each benchmark with the arguments after its verb, and returns its exit code."""
