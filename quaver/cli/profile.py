"""`quaver profile linear|ffn|block [options]`."""

import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from quaver.bench.groups import GROUPS
from quaver.bench.modules import KINDS, model_of
from quaver.bench.peer import is_peer_recipe
from quaver.bench.profile import profile_module
from quaver.bench.results import BFLOAT16, save, writable
from quaver.cli.bench.options import (
    Parser,
    add_model,
    add_recipes,
    add_torchao,
    check_batch,
    check_recipes,
    check_torchao,
    natural,
    positive,
)
from quaver.cli.bench.tables import EXIT_INTERRUPTED
from quaver.cli.errors import bad_input
from quaver.devices import resolve_device

MODES = ("eager", "compiled")

SUMMARY = "profile-{kind}.json"
"""The file in the folder that has the table."""


def run(argv: list[str]) -> int:
    """Profile as `argv` says, write traces and a summary; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints lines of its own
    options = _parser().parse_args(argv)
    with bad_input():
        model = model_of(options.model, divisor=options.divisor)
        batch = check_batch(options)
        precisions = _precisions(check_recipes(options.recipes), check_torchao(options.torchao))
        device = resolve_device(options.device)
        summary = writable(Path(options.output) / SUMMARY.format(kind=options.what))
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(width=max(160, Console().width))
    result = profile_module(
        options.what,
        f"{options.model}/{options.divisor}" if options.divisor > 1 else options.model,
        model,
        batch,
        precisions,
        options.modes,
        device=device,
        repeats=options.repeats,
        folder=summary.parent,
        report=lambda line: console.print(line, highlight=False, markup=False),
    )
    save(result, summary)
    _print(console, result, options.top)
    console.print(f"saved {summary}, and {len(result['rows'])} traces beside it, for https://ui.perfetto.dev")
    return 0 if result["complete"] else EXIT_INTERRUPTED


def _precisions(recipes: list[str], with_torchao: bool) -> list[str]:
    precisions = [BFLOAT16]
    for recipe in recipes:
        precisions.append(f"quaver {recipe}")
        if with_torchao and is_peer_recipe(recipe):
            precisions.append(f"torchao {recipe}")
    return precisions


def _parser() -> Parser:
    parser = Parser(
        "quaver profile", description="Chrome traces of forward and backward, and a table of kernels by group."
    )
    parser.add_argument("what", choices=KINDS, help="a linear (gate_proj), a feed-forward or a whole block of a Llama")
    add_model(parser)
    add_recipes(parser)
    add_torchao(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=natural, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument("--repeats", type=positive, default=3, help="forwards and backwards in one trace")
    parser.add_argument("--top", type=natural, default=8, help="rows of the longest work to print for each precision")
    parser.add_argument("--output", default="runs/profiles", help="the folder for the traces and the summary")
    return parser


def _print(console: Console, result: dict[str, Any], top: int) -> None:
    about = result["environment"]
    title = f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {about['commit']}"
    groups = Table(title=f"{title}: microseconds of one forward and backward, and the share of each group")
    for name in ("mode", "precision", "total", *GROUPS):
        groups.add_column(name, no_wrap=True)
    work = Table(title=f"the {top} longest of each")
    for name in ("mode", "precision", "direction", "group", "calls", "us", "share", "name"):
        work.add_column(name, no_wrap=True)
    for row in result["rows"]:
        who = (row["mode"], f"{row['library']} {row['recipe']}".strip())
        shares = (f"{row['group_us'][group]:,.0f} ({row['group_share'][group]:.0%})" for group in GROUPS)
        groups.add_row(*who, f"{row['total_us']:,.0f}", *shares)
        for each in row["work"][:top]:
            numbers = (f"{each['calls']:g}", f"{each['us']:,.1f}", f"{each['share']:.0%}")
            work.add_row(*who, each["direction"], each["group"], *numbers, each["name"][:60])
    console.print(groups)
    if top:
        console.print(work)
