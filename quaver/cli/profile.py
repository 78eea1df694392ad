"""`quaver profile linear|ffn|block [options]`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from quaver.bench.groups import GROUPS
from quaver.bench.modules import KINDS, model_of
from quaver.bench.peer import is_peer_recipe
from quaver.bench.profile import profile_module
from quaver.bench.results import BFLOAT16, MODES, Setup, save, title_of
from quaver.cli.bench.options import WIDTH, DeviceOptions, ModelOptions, Modes, Recipes, Torchao
from quaver.cli.bench.tables import PRECISION
from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import EXIT_INTERRUPTED, bad_input
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Positional


@dataclass(frozen=True)
class Profile(Modes, Torchao, Recipes, ModelOptions, DeviceOptions):
    """Chrome traces of forward and backward, and a table of kernels by group."""

    what: Annotated[str, OneOf(KINDS), Positional()] = "linear"
    """a linear (gate_proj), a feed-forward or a whole block of a Llama"""
    modes: tuple[Annotated[str, OneOf(MODES)], ...] = ("eager",)
    repeats: AtLeast1 = 3
    """Forwards and backwards in one trace."""
    top: NotNegative = 8
    """Rows of the longest work to print for each precision."""
    output: str = "runs/profiles"
    """Folder of the traces and the summary."""


def run(argv: list[str]) -> int:
    """Profile as `argv` says, write traces and a summary; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints lines of its own
    console = wide_console(WIDTH)
    with bad_input():
        options = parse_options(Profile, argv, prog=f"quaver profile {{{','.join(KINDS)}}}")
        model, batch = model_of(options.model, divisor=options.divisor), options.batch
        precisions = _precisions(options.recipe_names, options.with_torchao)
        summary = Path(options.output) / f"profile-{options.what}.json"
        device = options.open_device(summary)
    with_torchao = any(precision.startswith("torchao") for precision in precisions)
    setup = Setup(device, options.repeats, with_torchao=with_torchao, report=console.print)
    name, folder = options.model_name, summary.parent
    result = profile_module(setup, options.what, name, model, batch, precisions, options.modes, folder=folder)
    save(result, summary)
    _print(console, result, options.top)
    console.print(f"saved {summary}, and {len(result['rows'])} traces next to it, for https://ui.perfetto.dev")
    return 0 if result["complete"] else EXIT_INTERRUPTED


def _precisions(recipes: list[str], with_torchao: bool) -> list[str]:
    precisions = [BFLOAT16]
    for recipe in recipes:
        precisions.append(f"quaver {recipe}")
        if with_torchao and is_peer_recipe(recipe):
            precisions.append(f"torchao {recipe}")
    return precisions


def _print(console: Console, result: dict[str, Any], top: int) -> None:
    groups, work = [], []
    for row in result["rows"]:
        label = (row["mode"], PRECISION.text(row))
        shares = (f"{row['group_us'][group]:,.0f} ({row['group_share'][group]:.0%})" for group in GROUPS)
        groups.append((*label, f"{row['total_us']:,.0f}", *shares))
        for each in row["work"][:top]:
            numbers = (f"{each['calls']:g}", f"{each['us']:,.1f}", f"{each['share']:.0%}")
            work.append((*label, each["direction"], each["group"], *numbers, each["name"][:60]))
    title = f"{title_of(result)}: microseconds of one forward and backward, and the share of each group"
    console.print(make_table(title, ("mode", "precision", "total", *GROUPS), rows=groups))
    if top:
        columns = ("mode", "precision", "direction", "group", "calls", "us", "share", "name")
        console.print(make_table(f"the {top} longest of each", columns, rows=work))
