"""The options that benchmarks share, and what is checked of them before anything is timed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch

from quaver.bench.modules import MODEL_NAMES, Batch
from quaver.bench.peer import torchao_is_installed
from quaver.bench.results import MODES, Setup, writable
from quaver.bench.shapes import Shape, parse_shapes
from quaver.cli.console import wide_console
from quaver.config import Float8LinearConfig
from quaver.devices import resolve_device
from quaver.formats import HP_DTYPES
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.float8 import RECIPES
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Settings

WIDTH = 160
"""Columns of the tables where the terminal has fewer."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HP_DTYPES}

_Options = TypeVar("_Options", bound="BenchOptions")


@dataclass(frozen=True)
class DeviceOptions(Settings):
    """Where a benchmark runs."""

    device: str = "auto"
    """auto, cpu or cuda"""
    threads: NotNegative = 0
    """CPU threads; 0 for torch's default."""

    def open_device(self, output: Path) -> torch.device:
        """Return the device after checking that `output` can be written; set the number of CPU threads.

        Raises:
            ValueError: the output cannot be written.
            MissingDeviceError: the device is not there.
        """
        device = resolve_device(self.device)
        writable(output)
        if self.threads:
            torch.set_num_threads(self.threads)
        return device


@dataclass(frozen=True)
class BenchOptions(DeviceOptions):
    """Options of every benchmark: one of its subclasses has the name of the verb."""

    rounds: AtLeast1 = 20
    """Samples of each contestant."""
    output: str = ""
    """File of the JSON; benchmarks/results/VERB.json by default."""

    @property
    def output_file(self) -> Path:
        """The file of the JSON."""
        return Path(self.output or f"benchmarks/results/{type(self).__name__.lower()}.json")

    def setup(self) -> Setup:
        """What the benchmark is told; raises as `open_device` does."""
        return Setup(self.open_device(self.output_file), self.rounds, report=wide_console(WIDTH).print)


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
class OperandOptions(Torchao, BenchOptions):
    """Options of benchmarks of one matrix or linear."""

    dtype: Annotated[str, OneOf(tuple(_DTYPES))] = "bfloat16"
    """Dtype of the operands before quantization."""

    def setup(self) -> Setup:
        """What the benchmark is told; raises as `open_device` and `with_torchao` do."""
        with_torchao = self.with_torchao
        return replace(super().setup(), dtype=_DTYPES[self.dtype], with_torchao=with_torchao)


@dataclass(frozen=True)
class Shapes(Settings):
    """Which linears are timed."""

    shapes: str = "1024"
    """Linears: sizes (1024), M x K x N (512x1024x4096) or models (llama-8b, llama-70b), with commas between."""
    tokens: AtLeast1 = 2048
    """M of a model's linears."""
    divisor: AtLeast1 = 1
    """Divide K and N of a model's linears by this."""

    @property
    def linears(self) -> list[Shape]:
        """The shapes. Raises ValueError for text that is none."""
        return parse_shapes(self.shapes, tokens=self.tokens, divisor=self.divisor)


@dataclass(frozen=True)
class Recipes(Settings):
    """Which recipes are timed."""

    recipes: tuple[Annotated[str, OneOf(RECIPES, has_aliases=True)], ...] = ()
    """Recipes; all by default."""

    @property
    def recipe_names(self) -> list[str]:
        """Each recipe once. Raises ValueError for an unknown one."""
        for name in self.recipes:
            Float8LinearConfig.from_recipe_name(name)
        return list(dict.fromkeys(self.recipes or RECIPES))


@dataclass(frozen=True)
class Modes(Settings):
    """Whether the contestants are compiled."""

    modes: tuple[Annotated[str, OneOf(MODES)], ...] = MODES
    """Eager, compiled, or both."""


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


def parse_bench(kind: type[_Options], argv: list[str]) -> _Options:
    """Return the options of the benchmark that `kind` is named after."""
    return parse_options(kind, argv, prog=f"quaver bench {kind.__name__.lower()}")
