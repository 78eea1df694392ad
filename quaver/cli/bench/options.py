"""What the benchmarks' command lines share: a parser with one-line errors, and options with their checks."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console

from quaver.bench.modules import MODEL_NAMES, Batch
from quaver.bench.peer import torchao_is_installed
from quaver.bench.results import writable
from quaver.cli.errors import print_error
from quaver.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.devices import resolve_device
from quaver.formats import HP_DTYPES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HP_DTYPES}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}; see {self.prog} --help")
        sys.exit(2)


def positive(text: str) -> int:
    """An argument that is a number from 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An argument that is a number from 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {text!r}")
    return number


def bench_parser(verb: str, description: str, *, rounds: int = 20) -> Parser:
    """A parser with the options of every benchmark: --device, --threads, --rounds, --output."""
    parser = Parser(f"quaver bench {verb}", description=description)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=natural, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument("--rounds", type=positive, default=rounds, help="samples of each contestant")
    parser.add_argument("--output", default=f"benchmarks/results/{verb}.json", help="where the JSON goes")
    return parser


def add_torchao(parser: argparse.ArgumentParser) -> None:
    """Add --torchao."""
    parser.add_argument("--torchao", choices=["auto", "yes", "no"], default="auto", help="compare with torchao.float8")


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """Add --recipes."""
    parser.add_argument("--recipes", nargs="+", help="default: all")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model, --divisor, --tokens and --seq-len."""
    parser.add_argument("--model", choices=MODEL_NAMES, default="debug", help="whose block")
    parser.add_argument("--divisor", type=positive, default=1, help="divide widths and heads by this")
    parser.add_argument("--tokens", type=positive, default=2048, help="in one step")
    parser.add_argument("--seq-len", type=positive, help="tokens of a sequence; default: one sequence of --tokens")


def check_batch(options: argparse.Namespace) -> Batch:
    """The tokens of a step. Raises ValueError where they are no whole number of sequences."""
    seq_len = options.seq_len or options.tokens
    if options.tokens % seq_len:
        raise ValueError(f"--tokens: expected a multiple of --seq-len {seq_len}, got {options.tokens}")
    return Batch(options.tokens // seq_len, seq_len)


@dataclass(frozen=True)
class Surroundings:
    """What is the same for every benchmark, checked."""

    device: torch.device
    output: Path
    console: Console

    def report(self, line: str) -> None:
        """Print a line about what is measured now."""
        self.console.print(line, highlight=False, markup=False)


def check_common(options: argparse.Namespace) -> Surroundings:
    """The device, and an output that can be written to; sets the number of CPU threads.

    Raises:
        ValueError: the output cannot be written.
        MissingDeviceError: the device is not there.
    """
    device = resolve_device(options.device)
    output = writable(Path(options.output))
    if options.threads:
        torch.set_num_threads(options.threads)
    return Surroundings(device, output, Console(width=max(160, Console().width)))


def check_recipes(names: list[str] | None) -> list[str]:
    """The recipes asked for, each once, all where none is named. Raises ValueError for an unknown one."""
    names = list(dict.fromkeys(names or [name.value for name in Float8LinearRecipeName]))
    for name in names:
        Float8LinearConfig.from_recipe_name(name)
    return names


def check_torchao(choice: str) -> bool:
    """Whether to compare with torchao. Raises ValueError if it must be and is not installed."""
    if choice == "yes" and not torchao_is_installed():
        raise ValueError("--torchao yes: torchao is not installed; pip install 'quaver[bench]'")
    return choice != "no" and torchao_is_installed()
