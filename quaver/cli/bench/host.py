"""`quaver bench host [options]`."""

from dataclasses import dataclass

from quaver.bench.host import bench_host
from quaver.bench.shapes import Shape
from quaver.cli.bench.options import Modes, OperandOptions, Recipes, parse_bench
from quaver.cli.bench.tables import PRECISION, TIMES, Column, finish
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1


@dataclass(frozen=True)
class Host(Modes, Recipes, OperandOptions):
    """What the forward and backward of a tiny linear cost the host."""

    size: AtLeast1 = 16
    """M, K and N of the linear."""


def run(argv: list[str]) -> int:
    """Measure a tiny linear as `argv` says, save and print it; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Host, argv)
        recipes, size = options.recipe_names, options.size
        setup = options.setup()
    result = bench_host(setup, Shape("", size, size, size), recipes, options.modes)
    columns = [
        Column("mode", "mode"),
        PRECISION,
        *TIMES,
        Column("/ bfloat16", "time_over_bfloat16", ".2f"),
        Column("operations", "operations", "d", unknown="not counted"),
        Column("kernels", "kernels", "d", unknown="none: a CPU" if setup.device.type == "cpu" else "not seen"),
    ]
    return finish(options, result, columns, f"{size} x {size} x {size}, dtype {result['dtype']}")
