"""`quaver bench block [options]`."""

from dataclasses import dataclass

from quaver.bench.block import bench_block, check_fits
from quaver.bench.modules import model_of
from quaver.cli.bench.options import BenchOptions, ModelOptions, Modes, Recipes, parse_bench
from quaver.cli.bench.tables import PRECISION, TIMES, Column, finish, mebibytes
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1


@dataclass(frozen=True)
class Block(Modes, Recipes, ModelOptions, BenchOptions):
    """Forward, backward and AdamW of one transformer block, per recipe."""

    rounds: AtLeast1 = 10


def run(argv: list[str]) -> int:
    """Train a block as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Block, argv)
        model = model_of(options.model, divisor=options.divisor)
        batch, recipes = options.batch, options.recipe_names
        setup = options.setup()
        check_fits(model, 1 + len(recipes), setup.device)
    result = bench_block(setup, options.model_name, model, batch, recipes, options.modes)
    columns = [
        Column("mode", "mode"),
        PRECISION,
        *TIMES,
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("/ bfloat16", "time_over_bfloat16", ".2f"),
        mebibytes("resident", "resident_bytes"),
        mebibytes("peak", "peak_bytes"),
        mebibytes("tensors", "tensor_peak_bytes"),
        mebibytes("saved", "kept_bytes"),
        Column("peak / bfloat16", "peak_over_bfloat16", ".2f"),
    ]
    shape, tokens = result["model"], result["batch"]
    note = (
        f"block of {shape['name']}: width {shape['dim']}, {shape['n_heads']} heads ({shape['n_kv_heads']} for keys and "
        f"values), feed-forward {shape['hidden_dim']}; {tokens['sequences']} x {tokens['seq_len']} tokens; "
        "memory in MiB"
    )
    return finish(options, result, columns, note)
