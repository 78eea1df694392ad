"""The GPU tests and all benchmarks within nine minutes: `make gpu`, or `make gpu ARGS="gemm cast"` for some parts.

Needs a GPU and no network. Results go to $OUT, else to benchmarks/results. Each part has a time limit, and leaves its
rest to the next one. A part that runs longer is interrupted, so that a benchmark saves its finished rows. Parts that
fail or run longer are named at the end; the others still run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import torch

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 8
LAST_CHARACTERS = 6000


@dataclass(frozen=True)
class Part:
    """One command of Python modules and arguments, and the seconds it is given."""

    name: str
    words: list[str]
    seconds: int


def parts(results: Path) -> list[Part]:
    """All parts, the most important first; 520 seconds together."""

    def verb(name: str, seconds: int, *words: str) -> Part:
        output = str(results / f"gpu_{name}.json")
        words = ("-m", "quaver.cli", *words, "--device", "cuda", "--output", output)
        return Part(name, list(words), seconds)

    tokens = ("--tokens", "16384")
    recipes = ("--recipes", "tensorwise", "rowwise", "delayed")
    block = ("--model", "llama-8b", *tokens, "--seq-len", "8192")
    return [
        Part("doctor", ["-m", "quaver.cli", "doctor", "--json"], 30),
        Part("tests", ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *_workers(), "tests/gpu"], 150),
        verb("linear_llama8b", 75, "bench", "linear", "--shapes", "llama-8b", *tokens, "--rounds", "10"),
        verb("gemm", 25, "bench", "gemm", "--shapes", "llama-8b,llama-70b", *tokens, "--rounds", "10"),
        verb("cast", 40, "bench", "cast", "--shapes", "llama-8b,llama-70b", *tokens, "--rounds", "10"),
        verb("block_llama8b", 80, "bench", "block", *block, *recipes, "--rounds", "10"),
        verb("host", 25, "bench", "host", *recipes, "--rounds", "10"),
        verb("linear_llama70b", 40, "bench", "linear", "--shapes", "llama-70b", *tokens, *recipes, "--rounds", "5"),
        verb("train", 40, "bench", "train", *_LARGER_MODEL, *recipes, "--rounds", "10"),
        Part("memory", ["-m", "benchmarks.memory", "--only", "1 block", "1 rank"], 15),
    ]


def _workers() -> list[str]:
    """Options of pytest-xdist, where it is installed: the tests compile on the host most of the time."""
    count = min(os.cpu_count() or 1, 12)
    return ["-n", str(count)] if find_spec("xdist") and count > 1 else []


_LARGER_MODEL = (
    *("train_configs/llama3_debug.toml", "--training.compile", "--training.seq_len", "2048"),
    *("--training.local_batch_size", "4", "--model.dim", "2048", "--model.n_heads", "16", "--model.n_kv_heads", "8"),
    *("--model.hidden_dim", "7168", "--model.n_layers", "4"),
)
"""The debug model is too small for a GPU; four wider blocks, compiled."""


def main(names: list[str]) -> int:
    """Run the parts of these names, or all; returns 0 if all passed, 1 if not, 2 if nothing can run."""
    if not torch.cuda.is_available():
        print(f"make gpu needs a GPU, and torch {torch.__version__} sees none on this machine", file=sys.stderr)
        return 2
    results = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")).resolve()
    todo = parts(results)
    known = [part.name for part in todo]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"make gpu: unknown part {unknown[0]!r}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    results.mkdir(parents=True, exist_ok=True)
    outcomes = run_all([part for part in todo if not names or part.name in names], results)
    failed = {name: outcome for name, outcome in outcomes.items() if outcome["failure"]}
    took = sum(outcome["seconds"] for outcome in outcomes.values())
    (results / "gpu.json").write_text(json.dumps({"parts": outcomes}, indent=2) + "\n")
    verdict = ", ".join(f"{name} ({outcome['failure']})" for name, outcome in failed.items())
    print(f"{took:.0f} s, results in {results}; " + (f"FAILED: {verdict}" if failed else "all parts passed"))
    return bool(failed)


def run_all(todo: list[Part], results: Path) -> dict[str, dict]:
    """Run every part until its deadline, the sum of the seconds up to it; returns seconds and failure ("") by name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for commands with &
    outcomes = {}
    deadline = time.monotonic()
    for part in todo:
        deadline += part.seconds
        start = time.monotonic()
        log_path = results / f"gpu_{part.name}.log"
        print(f"== {part.name}, {deadline - start:.0f} s: python {' '.join(part.words)}", flush=True)
        with log_path.open("w") as log:
            failure = run(part.words, deadline - start, log)
        outcomes[part.name] = {"seconds": round(time.monotonic() - start, 1), "failure": failure}
        print(log_path.read_text(errors="replace")[-LAST_CHARACTERS:], flush=True)
    return outcomes


def run(words: list[str], limit_s: float, log: TextIO) -> str:
    """Run python with these words in the repository root; returns the reason of a failure, or "".

    GRACE_S before the limit the process is interrupted as by Ctrl-C, to save its results.
    """
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(max(limit_s - GRACE_S, 1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        _end(process)
        return f"stopped after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen) -> None:
    """Wait GRACE_S for an interrupted process, then kill it and its children."""
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
