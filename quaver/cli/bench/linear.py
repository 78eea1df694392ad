"""`quaver bench linear [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.linear import MODES, bench_linear
from quaver.bench.shapes import parse_shapes
from quaver.cli.bench.options import DTYPES, BenchOptions, Dtype, Recipes, Torchao, parse_bench, surroundings
from quaver.cli.bench.tables import TIMES, field, finish, number
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1, OneOf


@dataclass(frozen=True)
class Linear(Torchao, Recipes, BenchOptions):
    """Forward and backward of one linear, per recipe, against bfloat16 nn.Linear and torchao."""

    shapes: str = "1024,16"
    """Sizes (1024), M x K x N (512x1024x4096) or models (llama-8b, llama-70b), with commas between."""
    tokens: AtLeast1 = 2048
    """M of a model's linears."""
    divisor: AtLeast1 = 1
    """Divide K and N of a model's linears by this."""
    modes: tuple[Annotated[str, OneOf(tuple(MODES))], ...] = tuple(MODES)
    """Eager, compiled, or both."""
    dtype: Dtype = "bfloat16"
    """Dtype of the operands before quantization."""


def run(argv: list[str]) -> int:
    """Time a linear as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Linear, argv, "linear")
        shapes = parse_shapes(options.shapes, tokens=options.tokens, divisor=options.divisor)
        recipes, with_torchao = options.recipe_names, options.with_torchao
        around = surroundings(options)
    result = bench_linear(
        shapes,
        recipes,
        list(options.modes),
        device=around.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=around.report,
    )
    columns = [
        ("shape", field("shape")),
        ("mode", field("mode")),
        ("library", field("library")),
        ("recipe", field("recipe")),
        *TIMES,
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("torchao / this", number("torchao_time_over_this", ".2f", unknown="")),
    ]
    return finish(around, result, columns, f"dtype {result['dtype']}")
