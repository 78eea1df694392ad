"""Prints what this machine can do: each recipe on each device, torch.compile, versions, slow paths."""

from __future__ import annotations

import json

from quaver.lab.bench.doctor import diagnose
from quaver.lab.bench.working import working


def print_machine(*, as_json: bool, try_compile: bool) -> int:
    """Print it; 0 if every recipe runs on every device, 1 if one does not."""
    with working("trying each recipe"):
        found = diagnose(try_compile=try_compile)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0 if found["ok"] else 1
    for name, text in {**found["versions"], **found["devices"], "torch.compile": found["compile"]}.items():
        print(f"{name:<14} {text}")
    for device in found["devices"]:
        print(f"\nfloat8 matmuls on {device}")
        for each in found["recipes"]:
            if each["device"] == device:
                print(f"  {each['recipe']:<31} {each['verdict']:<7} {each['detail']}")
        print(found["recommended"][device])
    for slow_path in found["slow_paths"]:
        print(f"slow path: {slow_path}")
    return 0 if found["ok"] else 1
