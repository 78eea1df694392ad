"""`quaver profile linear|ffn|block [options]`."""

import os
from typing import Any

from rich.console import Console

from quaver.bench.groups import GROUPS
from quaver.bench.modules import KINDS
from quaver.bench.profile import Profile
from quaver.bench.results import save, title_of
from quaver.cli.bench import WIDTH
from quaver.cli.console import make_table, wide_console
from quaver.cli.errors import EXIT_INTERRUPTED, bad_input
from quaver.trainer.config.flags import parse_options


def run(argv: list[str]) -> int:
    """Profile as `argv` says, write traces and a summary; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints lines of its own
    with bad_input():
        options = parse_options(Profile, argv, prog=f"quaver profile {{{','.join(KINDS)}}}")
        options.prepare()
    result = options.measure()
    save(result, options.result_file)
    console = wide_console(WIDTH)
    _print(console, result, options.top)
    traces = f"{len(result['rows'])} traces next to it, for https://ui.perfetto.dev"
    console.print(f"saved {options.result_file}, and {traces}")
    return 0 if result["complete"] else EXIT_INTERRUPTED


def _print(console: Console, result: dict[str, Any], top: int) -> None:
    groups, work = [], []
    for row in result["rows"]:
        label = (row["mode"], f"{row['library']} {row['recipe']}".strip())
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
