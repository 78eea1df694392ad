"""The options that benchmarks share, and what is checked of them before anything is timed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
from rich.console import Console

from quaver.bench.modules import MODEL_NAMES, Batch
from quaver.bench.peer import torchao_is_installed
from quaver.bench.results import writable
from quaver.config import Float8LinearConfig
from quaver.devices import resolve_device
from quaver.formats import HP_DTYPES
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.float8 import RECIPES
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Settings

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HP_DTYPES}

Recipe = Annotated[str, OneOf(RECIPES, has_aliases=True)]
Dtype = Annotated[str, OneOf(tuple(DTYPES))]

_Options = TypeVar("_Options", bound="BenchOptions")


@dataclass(frozen=True)
class BenchOptions(Settings):
    """Options of every benchmark."""

    device: str = "auto"
    """auto, cpu or cuda"""
    threads: NotNegative = 0
    """CPU threads; 0 for torch's default."""
    rounds: AtLeast1 = 20
    """Samples of each contestant."""
    output: str = ""
    """File of the JSON; benchmarks/results/VERB.json by default."""


@dataclass(frozen=True)
class Recipes(Settings):
    """Which recipes are timed."""

    recipes: tuple[Recipe, ...] = ()
    """Recipes; all by default."""

    @property
    def recipe_names(self) -> list[str]:
        """Each recipe once. Raises ValueError for an unknown one."""
        for name in self.recipes:
            Float8LinearConfig.from_recipe_name(name)
        return list(dict.fromkeys(self.recipes or RECIPES))


@dataclass(frozen=True)
class Torchao(Settings):
    """Whether torchao is timed too."""

    torchao: Annotated[str, OneOf(("auto", "yes", "no"))] = "auto"
    """Compare with torchao.float8; auto: if it is installed."""

    @property
    def with_torchao(self) -> bool:
        """Whether to compare with torchao. Raises ValueError if it must be and is not installed."""
        if self.torchao == "yes" and not torchao_is_installed():
            raise ValueError("--torchao yes: torchao is not installed; pip install 'quaver[bench]'")
        return self.torchao != "no" and torchao_is_installed()


@dataclass(frozen=True)
class ModelOptions(Settings):
    """The block of a model, and the tokens of a step."""

    model: Annotated[str, OneOf(tuple(MODEL_NAMES))] = "debug"
    """The model of the block."""
    divisor: AtLeast1 = 1
    """Divide widths and heads by this."""
    tokens: AtLeast1 = 2048
    """Tokens in one step."""
    seq_len: AtLeast1 | None = None
    """Tokens of a sequence; by default one sequence of --tokens."""

    @property
    def model_name(self) -> str:
        """The model and the divisor, as results name them."""
        return f"{self.model}/{self.divisor}" if self.divisor > 1 else self.model

    @property
    def batch(self) -> Batch:
        """The tokens of a step. Raises ValueError if they are no whole number of sequences."""
        seq_len = self.seq_len or self.tokens
        if self.tokens % seq_len:
            raise ValueError(f"--tokens: expected a multiple of --seq-len {seq_len}, got {self.tokens}")
        return Batch(self.tokens // seq_len, seq_len)


@dataclass(frozen=True)
class Surroundings:
    """What is the same for every benchmark, checked."""

    device: torch.device
    output: Path
    console: Console

    def report(self, line: str) -> None:
        """Print a line about what is measured now."""
        self.console.print(line, highlight=False, markup=False)


def parse_bench(kind: type[_Options], argv: list[str], verb: str) -> _Options:
    """Return the options of `quaver bench <verb>`; the JSON goes to benchmarks/results/<verb>.json by default."""
    options = parse_options(kind, argv, prog=f"quaver bench {verb}")
    return replace(options, output=options.output or f"benchmarks/results/{verb}.json")


def surroundings(options: BenchOptions) -> Surroundings:
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
