"""`quaver bench block [options]`."""

from dataclasses import dataclass
from typing import Annotated

from quaver.bench.block import MODES, bench_block, check_fits
from quaver.bench.modules import model_of
from quaver.cli.bench.options import BenchOptions, ModelOptions, Recipes, parse_bench, surroundings
from quaver.cli.bench.tables import TIMES, field, finish, mebibytes, number, precision
from quaver.cli.errors import bad_input
from quaver.trainer.config.settings import AtLeast1, OneOf


@dataclass(frozen=True)
class Block(Recipes, ModelOptions, BenchOptions):
    """Forward, backward and AdamW of one transformer block, per recipe."""

    rounds: AtLeast1 = 10
    modes: tuple[Annotated[str, OneOf(tuple(MODES))], ...] = tuple(MODES)
    """Eager, compiled, or both."""


def run(argv: list[str]) -> int:
    """Train a block as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    with bad_input():
        options = parse_bench(Block, argv, "block")
        model = model_of(options.model, divisor=options.divisor)
        batch, recipes = options.batch, options.recipe_names
        around = surroundings(options)
        check_fits(model, 1 + len(recipes), around.device)
    result = bench_block(
        options.model_name,
        model,
        batch,
        recipes,
        options.modes,
        device=around.device,
        rounds=options.rounds,
        report=around.report,
    )
    columns = [
        ("mode", field("mode")),
        ("precision", precision),
        *TIMES,
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("/ bfloat16", number("time_over_bfloat16", ".2f")),
        ("resident", mebibytes("resident_bytes")),
        ("peak", mebibytes("peak_bytes")),
        ("tensors", mebibytes("tensor_peak_bytes")),
        ("saved", mebibytes("kept_bytes")),
        ("peak / bfloat16", number("peak_over_bfloat16", ".2f")),
    ]
    shape, tokens = result["model"], result["batch"]
    note = (
        f"block of {shape['name']}: width {shape['dim']}, {shape['n_heads']} heads ({shape['n_kv_heads']} for keys and "
        f"values), feed-forward {shape['hidden_dim']}; {tokens['sequences']} x {tokens['seq_len']} tokens; "
        "memory in MiB"
    )
    return finish(around, result, columns, note)
