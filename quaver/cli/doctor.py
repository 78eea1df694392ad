"""`quaver doctor [--json] [--no-compile]`."""

import json
from dataclasses import dataclass

from quaver.bench.doctor import diagnose
from quaver.cli.console import make_table, wide_console
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
    found = diagnose(try_compile=options.compile)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        console = wide_console(100)
        for name, text in {**found["versions"], **found["devices"], "torch.compile": found["compile"]}.items():
            console.print(f"{name:<14} {text}")
        columns = ("device", "recipe", "float8 matmul", "how")
        rows = [each.values() for each in found["recipes"]]
        console.print(make_table(None, columns, rows=rows, wrapped=columns))
        for device, sentence in found["recommended"].items():
            console.print(f"{device}: {sentence}", soft_wrap=True)
        for slow_path in found["slow_paths"]:
            console.print(f"slow path: {slow_path}", soft_wrap=True)
    return 0 if found["ok"] else 1
