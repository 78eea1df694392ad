"""`quaver bench linear [options]`."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from quaver.bench.linear import MODES, bench_linear, torchao_is_installed
from quaver.bench.shapes import MODELS, parse_shapes
from quaver.cli.errors import bad_input
from quaver.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.devices import resolve_device
from quaver.formats import HP_DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HP_DTYPES}


def run(argv: list[str]) -> int:
    """Time a linear as `argv` says, print the table, save the JSON; 0 when done, 2 for bad input."""
    options = _parser().parse_args(argv)
    with bad_input():
        device = resolve_device(options.device)
        if options.tokens < 1 or options.divisor < 1 or options.rounds < 1 or options.threads < 0:
            raise ValueError("--tokens, --divisor and --rounds: expected 1 or more, --threads: 0 or more")
        shapes = parse_shapes(options.shapes, tokens=options.tokens, divisor=options.divisor)
        recipes = options.recipes or [name.value for name in Float8LinearRecipeName]
        for recipe in recipes:
            Float8LinearConfig.from_recipe_name(recipe)
        if options.torchao == "yes" and not torchao_is_installed():
            raise ValueError("--torchao yes: torchao is not installed; pip install 'quaver[bench]'")
        output = _writable(Path(options.output))
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(width=max(140, Console().width))
    result = bench_linear(
        shapes,
        recipes,
        options.modes,
        device=device,
        dtype=_DTYPES[options.dtype],
        rounds=options.rounds,
        with_torchao=options.torchao != "no" and torchao_is_installed(),
        report=lambda line: console.print(line, highlight=False),
    )
    output.write_text(json.dumps(result, indent=2) + "\n")
    _print(console, result)
    console.print(f"saved {output}", highlight=False)
    return 0


def _writable(path: Path) -> Path:
    """`path`, which can be written to: found out before the measurement, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ValueError(f"--output: cannot write {path}: {error.strerror}") from error
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "quaver bench linear",
        description="Forward and backward of one linear, per recipe, against bfloat16 nn.Linear and torchao.",
    )
    parser.add_argument("what", choices=["linear"])
    parser.add_argument(
        "--shapes",
        default="1024,16",
        help=f"sizes (1024), M x K x N (512x1024x4096) or models ({', '.join(MODELS)}), with commas between",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="M of a model's linears")
    parser.add_argument("--divisor", type=int, default=1, help="divide K and N of a model's linears by this")
    parser.add_argument("--recipes", nargs="+", help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each contestant")
    parser.add_argument("--torchao", choices=["auto", "yes", "no"], default="auto", help="compare with torchao.float8")
    parser.add_argument("--output", default="benchmarks/results/linear.json", help="where the JSON goes")
    return parser


def _print(console: Console, result: dict[str, Any]) -> None:
    about = result["environment"]
    title = f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {result['dtype']}"
    table = Table(title=title)
    for column in ("shape", "mode", "library", "recipe", "median", "p10 .. p90", "/ bfloat16", "torchao / this"):
        table.add_column(column, no_wrap=True)
    for row in result["rows"]:
        timing, peer = row["timing"], row["torchao_time_over_this"]
        table.add_row(
            row["shape"],
            row["mode"],
            row["library"],
            row["recipe"],
            f"{timing['median_us']:,.1f} us",
            f"{timing['p10_us']:,.1f} .. {timing['p90_us']:,.1f}",
            f"{row['time_over_bfloat16']:.2f}",
            "" if peer is None else f"{peer:.2f}",
        )
    console.print(table)
