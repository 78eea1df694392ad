"""The options that benchmarks share.

The dataclass of a benchmark inherits from these and has the name of its verb. It measures in its method `measure`, or
for `train` in `measure_steps`, which gets models that are made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le

from quaver.lab.bench.results import Result, Row, UnfinishedError
from quaver.lab.bench.shapes import MAX_SIZE, Shape, parse_shapes
from quaver.lab.output_file import Output, check_outputs
from quaver.lab.runs.provenance import describe_measurement
from quaver.lab.settings.fields import AtLeast1, OneOf, Settings, UserPath, setting
from quaver.lab.settings.float8 import RECIPES, RecipeName
from quaver.lab.settings.training import DEVICES
from quaver.lab.terminal.progress import show_progress
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.runtime.devices import resolve_device
from quaver.runtime.errors import InputError
from quaver.torch_private.compiler import recompile_limit

MODES = ("eager", "compiled")

MAX_COMPILED_VARIANTS = 64
"""Limit on torch.compile's variants of one forward. Every recipe is a variant, and torch's default limit is 8."""

Size = Annotated[int, Ge(1), Le(MAX_SIZE)]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HP_DTYPES}


@dataclass(frozen=True)
class BenchOptions(Settings):
    """The device, the samples and the output of a benchmark."""

    device: Annotated[str, OneOf(DEVICES)] = setting("auto", "Where it runs; auto: a GPU if there is one.")
    threads: Annotated[int, Ge(0), Le(10_000)] = setting(0, "CPU threads; 0 for torch's default.")
    output: UserPath = setting("", "File of the JSON; runs/bench-VERB.json by default.")
    rounds: AtLeast1 = setting(20, "Samples of each contestant.")

    case_fields: ClassVar[tuple[str, ...]] = ()
    """Rows that are equal in these fields are printed together, under their values."""
    tables: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The fields of a row that each printed table shows."""

    @property
    def verb(self) -> str:
        """The verb of `quaver bench` that runs it."""
        return type(self).__name__.removesuffix("Benchmark").lower()

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises MissingDeviceError if this machine has none."""
        return resolve_device(self.device)

    @property
    def result_file(self) -> Path:
        """The file of the JSON."""
        return Path(self.output or f"runs/bench-{self.verb}.json")

    @property
    def with_torchao(self) -> bool:
        """Whether torchao is timed too."""
        return False

    def prepare(self) -> None:
        """Set the number of CPU threads, after checking the device and the output.

        Raises:
            InputError: `check_outputs` refuses the output.
            MissingDeviceError: this machine has no such device.
        """
        resolve_device(self.device)
        check_outputs(Output(self.result_file))
        if self.threads:
            torch.set_num_threads(self.threads)

    def run_cases(self, cases: Iterable[tuple[Any, ...]], make_rows: Callable[..., list[Row]], **fields: Any) -> Result:
        """Measure each case with `make_rows(*case)`, and return the result of all rows.

        Raises:
            UnfinishedError: an error or Ctrl-C ended a case after the first; it has the rows of the finished cases.
        """
        rows: list[Row] = []
        try:
            with recompile_limit(MAX_COMPILED_VARIANTS), show_progress("preparing") as set_activity:
                for case in cases:
                    set_activity(", ".join(map(str, case)))
                    torch.compiler.reset()
                    rows += make_rows(*case)
        except (Exception, KeyboardInterrupt) as error:
            if not rows:
                raise
            raise UnfinishedError(self.make_result(rows, is_complete=False, **fields), error) from error
        return self.make_result(rows, **fields)

    def make_result(self, rows: list[Row], *, is_complete: bool = True, **fields: Any) -> Result:
        """Return {"benchmark", "environment", "complete", `fields`, "rows"}, ready for JSON."""
        environment = describe_measurement(self.torch_device)
        environment |= {"torchao": version("torchao")} if self.with_torchao else {}
        head = {"benchmark": self.verb, "environment": environment, "complete": is_complete}
        return head | fields | {"rows": rows}

    def format_note(self, result: Result) -> str:
        """Return the line below the printed table."""
        raise NotImplementedError


@dataclass(frozen=True)
class OperandOptions(BenchOptions):
    """Options of benchmarks of one matrix or linear, which compare with torchao."""

    torchao: Annotated[str, OneOf(("auto", "yes", "no"))] = setting(
        "auto", "Compare with torchao.float8; auto: if it is installed."
    )
    dtype: Annotated[str, OneOf(tuple(_DTYPES))] = setting("bfloat16", "Dtype of the operands before quantization.")

    def check(self) -> None:
        """Raise InputError if torchao is to be timed and is not installed."""
        super().check()
        if self.torchao == "yes" and find_spec("torchao") is None:
            raise InputError("--torchao yes: torchao is not installed; pip install 'quaver[bench]'")

    @property
    def with_torchao(self) -> bool:
        """Whether torchao is timed too."""
        return self.torchao != "no" and find_spec("torchao") is not None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    def format_note(self, result: Result) -> str:
        return f"dtype {self.dtype}"


@dataclass(frozen=True)
class ShapeOptions(Settings):
    """Which linears are timed."""

    shapes: str = setting(
        "1024", "Linears: sizes (1024), M x K x N (512x1024x4096) or models (llama-8b, llama-70b), with commas between."
    )
    tokens: Size = setting(2048, "M of a model's linears.")
    divisor: AtLeast1 = setting(1, "Divide K and N of a model's linears by this.")

    are_matrices: ClassVar[bool] = False
    """Whether a shape describes one operand instead of a matmul."""

    def check(self) -> None:
        """Raise InputError for text that is not a shape, and for options of models without a model."""
        super().check()
        if not any(shape.layer for shape in self.parse_shapes()):
            self.require_default("tokens", "divisor", unless="--shapes names a model")

    def parse_shapes(self) -> list[Shape]:
        """Return the shapes. Raises InputError for other text."""
        return parse_shapes(self.shapes, tokens=self.tokens, divisor=self.divisor, matrices=self.are_matrices)


@dataclass(frozen=True)
class RecipeOptions(Settings):
    """Which recipes are timed."""

    recipes: tuple[RecipeName, ...] = setting((), "Recipes; all by default.")

    @property
    def recipe_names(self) -> list[str]:
        """Each recipe once, without aliases."""
        return list(dict.fromkeys(map(canonicalize_recipe, self.recipes or RECIPES)))


@dataclass(frozen=True)
class ModeOptions(Settings):
    """Whether the contestants are compiled."""

    modes: tuple[Annotated[str, OneOf(MODES)], ...] = setting(MODES, "Eager, compiled, or both.")

    @property
    def mode_names(self) -> list[str]:
        """Each mode once."""
        return list(dict.fromkeys(self.modes))
