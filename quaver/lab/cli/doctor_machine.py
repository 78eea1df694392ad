"""Prints what this machine can do: each recipe on each device, torch.compile, versions, slow paths."""

from __future__ import annotations

import json

from quaver.lab.doctor.machine import diagnose
from quaver.lab.terminal.progress import show_progress


def print_machine(*, as_json: bool, try_compile: bool) -> int:
    """Print the diagnosis; returns 0 if every recipe runs on every device, else 1."""
    with show_progress("trying each recipe"):
        diagnosis = diagnose(try_compile=try_compile)
    if as_json:
        print(json.dumps(diagnosis, indent=2))
        return 0 if diagnosis["ok"] else 1
    for name, text in {**diagnosis["versions"], **diagnosis["devices"], "torch.compile": diagnosis["compile"]}.items():
        print(f"{name:<14} {text}")
    for device in diagnosis["devices"]:
        print(f"\nfloat8 matmuls on {device}")
        for recipe in diagnosis["recipes"]:
            if recipe["device"] == device:
                print(f"  {recipe['recipe']:<31} {recipe['verdict']:<7} {recipe['detail']}")
        print(diagnosis["recommended"][device])
    for slow_path in diagnosis["slow_paths"]:
        print(f"slow path: {slow_path}")
    return 0 if diagnosis["ok"] else 1
