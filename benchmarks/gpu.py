"""The GPU tests and benchmarks in one go, within nine minutes: `make gpu`.

Runs on any machine with a suitable GPU and needs no network. Results go to $OUT, else to benchmarks/results. A part
that fails is named at the end, and the others still run.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 9 * 60


def main() -> int:
    if not torch.cuda.is_available():
        print(f"make gpu needs a GPU, and torch {torch.__version__} sees none on this machine", file=sys.stderr)
        return 2
    results = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    results.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    bench = [python, "-m", "quaver.cli", "bench", "linear", "--device", "cuda"]
    parts = {
        "doctor": ([python, "-m", "quaver.cli", "doctor", "--json"], 90),
        "tests": ([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"], 240),
        "linear": (
            [*bench, "--shapes", "llama-8b", "--tokens", "16384", "--rounds", "10"]
            + ["--output", str(results / "linear_gpu_llama8b.json")],
            150,
        ),
        "host": ([*bench, "--shapes", "16", "--rounds", "10", "--output", str(results / "linear_gpu_16.json")], 60),
    }
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    start = time.monotonic()
    failed = []
    for name, (command, limit_s) in parts.items():
        left_s = LIMIT_S - (time.monotonic() - start)
        print(f"== {name}: {' '.join(command)}", flush=True)
        with (results / f"{name}.log").open("w") as log:
            outcome = run(command, environment, min(limit_s, left_s), log)
        print((results / f"{name}.log").read_text()[-3000:], flush=True)
        if outcome:
            failed.append(f"{name} ({outcome})")
    print(f"{time.monotonic() - start:.0f} s; " + (f"FAILED: {', '.join(failed)}" if failed else "all parts passed"))
    return bool(failed)


def run(command, environment, limit_s, log) -> str:
    """Why the command failed; empty if it did not."""
    if limit_s <= 0:
        return "no time was left"
    try:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_s, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


if __name__ == "__main__":
    sys.exit(main())
