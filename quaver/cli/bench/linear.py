"""`quaver bench linear [options]`."""

from dataclasses import dataclass

from quaver.bench.linear import bench_linear
from quaver.cli.bench.options import Modes, OperandOptions, Recipes, Shapes, parse_bench
from quaver.cli.bench.tables import TIMES, Column, finish
from quaver.cli.errors import bad_input


@dataclass(frozen=True)
class Linear(Modes, Shapes, Recipes, OperandOptions):
    """Forward and backward of one linear, per recipe, against bfloat16 nn.Linear and torchao."""

    shapes: str = "1024,16"


def run(argv: list[str]) -> int:
    """Time a linear as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Linear, argv)
        shapes, recipes = options.linears, options.recipe_names
        setup = options.setup()
    result = bench_linear(setup, shapes, recipes, options.modes)
    columns = [
        Column("shape", "shape"),
        Column("mode", "mode"),
        Column("library", "library"),
        Column("recipe", "recipe"),
        *TIMES,
        Column("/ bfloat16", "time_over_bfloat16", ".2f"),
        Column("torchao / this", "torchao_time_over_this", ".2f", unknown=""),
    ]
    return finish(options, result, columns, f"dtype {result['dtype']}")
