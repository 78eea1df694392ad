"""`quaver bench host [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.host import bench_host
from quaver.bench.linear import MODES
from quaver.bench.shapes import Shape
from quaver.cli.bench.options import DTYPES, BenchOptions, Dtype, Recipes, Torchao, parse_bench, surroundings
from quaver.cli.bench.tables import TIMES, field, finish, number, precision
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1, OneOf


@dataclass(frozen=True)
class Host(Torchao, Recipes, BenchOptions):
    """What the forward and backward of a tiny linear cost the host."""

    size: AtLeast1 = 16
    """M, K and N of the linear."""
    modes: tuple[Annotated[str, OneOf(tuple(MODES))], ...] = tuple(MODES)
    """Eager, compiled, or both."""
    dtype: Dtype = "bfloat16"
    """Dtype of the operands before quantization."""


def run(argv: list[str]) -> int:
    """Measure a tiny linear as `argv` says, save and print it; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Host, argv, "host")
        recipes, with_torchao = options.recipe_names, options.with_torchao
        around = surroundings(options)
    size = options.size
    result = bench_host(
        Shape("", size, size, size),
        recipes,
        options.modes,
        device=around.device,
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=with_torchao,
        report=around.report,
    )
    no_kernels = "none: a CPU" if around.device.type == "cpu" else "not seen"
    columns = [
        ("mode", field("mode")),
        ("precision", precision),
        *TIMES,
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("operations", number("operations", "d", unknown="not counted")),
        ("kernels", number("kernels", "d", unknown=no_kernels)),
    ]
    return finish(around, result, columns, f"{size} x {size} x {size}, dtype {result['dtype']}")
