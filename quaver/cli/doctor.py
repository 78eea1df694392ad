"""`quaver doctor [--json] [--no-compile]`."""

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from quaver.bench.doctor import Diagnosis, diagnose
from quaver.cli.errors import bad_input
from quaver.trainer.config.flags import parse_options
from quaver.trainer.config.settings import Settings


@dataclass(frozen=True)
class Doctor(Settings):
    """Try each float8 recipe on each device of this machine, and say what works."""

    json: bool = False
    """Print JSON."""
    compile: bool = True
    """Try torch.compile, which takes seconds; --no-compile leaves it out."""


def run(argv: list[str]) -> int:
    """Print what this machine can do; 0 if every recipe runs on every device, 1 if one does not."""
    with bad_input():
        options = parse_options(Doctor, argv, prog="quaver doctor")
    diagnosis = diagnose(try_compile=options.compile)
    if options.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _print(diagnosis)
    return 0 if diagnosis.ok else 1


def _print(diagnosis: Diagnosis) -> None:
    console = Console(width=max(100, Console().width))
    for name, text in {**diagnosis.versions, **diagnosis.devices, "torch.compile": diagnosis.compile}.items():
        console.print(f"{name:<14} {text}", highlight=False)
    table = Table("device", "recipe", "float8 matmul", "how")
    for finding in diagnosis.recipes:
        table.add_row(finding.device, finding.recipe, finding.verdict, finding.detail)
    console.print(table)
