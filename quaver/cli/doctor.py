"""`quaver doctor [--json] [--no-compile]`."""

import argparse
import json

from rich.console import Console
from rich.table import Table

from quaver.doctor import Diagnosis, diagnose


def run(argv: list[str]) -> int:
    """Print what this machine can do; 0 if every recipe runs on every device, 1 if one does not."""
    parser = argparse.ArgumentParser("quaver doctor", description="Say what this machine can do, by trying it.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-compile", action="store_true", help="do not try torch.compile, which takes seconds")
    options = parser.parse_args(argv)
    diagnosis = diagnose(try_compile=not options.no_compile)
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
