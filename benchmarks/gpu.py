"""Runs measurements and tests on a GPU: `make gpu`, or `make gpu ARGS="quiet"` with the names of groups or parts.

    quiet     the measurements, most important first; nothing else should run meanwhile. 540 seconds at most
    tests     the tests that need a GPU, alone and last: they use every core. 330 seconds at most
    second    more measurements: experts, optimizer, stored activations, CUDA graphs, FSDP2, a run of 1B, quaver bench

`make gpu` runs quiet and tests. It needs a GPU and no network; `--dry` runs only parts of benchmarks/gpu_parts, at
small sizes on a CPU. Results go to gpu.json, and the output of parts to gpu.log, in $OUT, else in benchmarks/results.
gpu.json is written whenever a part ends. Each part has a time limit. A part that runs longer is interrupted and keeps
the rows that it has. Parts that fail or run longer are named at the end; the others still run. After wrong gradients
nothing is timed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 8
EXIT_WRONG_GRADIENTS = 3
"""The exit code of a part of benchmarks/gpu_parts that found wrong gradients."""
MAX_LOG_CHARACTERS = 6000
DRY_SECONDS = 600
"""The time limit of a part on a CPU, which may have other work."""


@dataclass(frozen=True)
class GpuPart:
    """One command of Python modules and arguments, and the seconds it is given."""

    name: str
    argv: list[str]
    seconds: int
    output: Path | None = None
    """The file to which it writes its result as JSON; None for a part that prints it."""


def make_parts(folder: Path, *, dry: bool = False) -> dict[str, list[GpuPart]]:
    """Return all parts by group, in the order in which they run. Their files are in `folder`."""

    def make_part(name: str, seconds: int) -> GpuPart:
        output = folder / f"{name}.json"
        argv = ["-m", "benchmarks.gpu_parts", name, "--output", str(output)]
        if dry:
            return GpuPart(name, [*argv, "--dry"], DRY_SECONDS, output)
        return GpuPart(name, [*argv, "--seconds", str(seconds - 2 * GRACE_S)], seconds, output)

    def make_verb_part(name: str, seconds: int, *argv: str) -> GpuPart:
        output = folder / f"{name}.json"
        return GpuPart(name, ["-m", "quaver", *argv, "--device", "cuda", "--output", str(output)], seconds, output)

    tokens = ("--tokens", "16384")
    recipes = ("--recipes", "tensorwise", "rowwise", "delayed")
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *_make_xdist_options(), "tests/gpu"]
    groups = {
        "quiet": [
            GpuPart("doctor", ["-m", "quaver", "doctor", "--json"], 30),
            make_part("rates", 25),
            make_part("gradients", 130),
            make_part("kernels", 60),
            make_part("blocks", 165),
            make_part("attention", 20),
            make_part("eager", 60),
            make_part("matmuls", 50),
        ],
        "tests": [GpuPart("tests", tests, 330)],
        "second": [
            make_part("experts", 60),
            make_part("optimizers", 40),
            make_part("stored", 120),
            make_part("graphs", 150),
            make_part("fsdp", 90),
            GpuPart("train_1b", ["-m", "quaver", *_TRAIN_1B, "--job.dump_folder", str(folder / "runs")], 420),
            make_verb_part("linear", 75, "bench", "linear", "--shapes", "llama-8b", *tokens, "--rounds", "10"),
            make_verb_part("host", 25, "bench", "host", *recipes, "--rounds", "10"),
            make_verb_part("train", 40, "bench", "train", *_LARGER_MODEL, *recipes, "--rounds", "10"),
            GpuPart("memory", ["-m", "benchmarks.memory", "--only", "1 block", "1 rank"], 15),
        ],
    }
    if dry:
        groups = {name: [part for part in group if "--dry" in part.argv] for name, group in groups.items()}
    return groups


DEFAULT_GROUPS = ("quiet", "tests")
GRADIENTS_PART = "gradients"
"""The part whose exit code `EXIT_WRONG_GRADIENTS` stops all later parts but the tests."""


def _make_xdist_options() -> list[str]:
    """Return options of pytest-xdist if it is installed: the tests mostly wait for compilers on the host."""
    count = min(os.cpu_count() or 1, 12)
    return ["-n", str(count)] if find_spec("xdist") and count > 1 else []


_LARGER_MODEL = (
    *("train_configs/llama3_debug.toml", "--training.compile", "--training.seq_len", "2048"),
    *("--training.local_batch_size", "4", "--model.dim", "2048", "--model.n_heads", "16", "--model.n_kv_heads", "8"),
    *("--model.hidden_dim", "7168", "--model.n_layers", "4"),
)
"""Four wider blocks, compiled: the debug model is too small for a GPU."""

_TRAIN_1B = (
    *("train", "train_configs/llama3_debug.toml", "--job.compare", "--training.compile", "--training.steps", "60"),
    *("--training.seq_len", "2048", "--training.local_batch_size", "4", "--float8.recipe_name", "rowwise"),
    *("--model.dim", "2048", "--model.n_heads", "32", "--model.n_kv_heads", "8", "--model.hidden_dim", "8192"),
    *("--model.n_layers", "16"),
)
"""Llama 3.2 1B's blocks with the debug model's bytes for tokens, in float8 and in bfloat16."""


def main(argv: list[str]) -> int:
    """Run the groups and parts named, or `DEFAULT_GROUPS`; return 0 if all pass, 1 if not, 2 if nothing can run."""
    parser = argparse.ArgumentParser(
        "make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="groups or parts")
    parser.add_argument("--dry", action="store_true", help="small sizes on a CPU; times mean nothing")
    options = parser.parse_args(argv)
    dry, names = options.dry, options.names
    if not dry and not torch.cuda.is_available():
        print(f"make gpu needs a GPU, and torch {torch.__version__} sees none on this machine", file=sys.stderr)
        return 2
    results = Path(os.environ.get("OUT", ROOT / ("build/gpu_dry" if dry else "benchmarks/results"))).resolve()
    groups = make_parts(ROOT / "build" / "gpu_parts", dry=dry)
    by_name = {part.name: [part] for group in groups.values() for part in group} | {
        name: group for name, group in groups.items() if name not in [part.name for part in group]
    }
    unknown = [name for name in names if name not in by_name]
    if unknown:
        print(f"make gpu: unknown part {unknown[0]!r}; choose from {', '.join([*groups, *by_name])}", file=sys.stderr)
        return 2
    wanted = {part.name for name in names or DEFAULT_GROUPS for part in by_name.get(name, [])}
    todo = [part for group in groups.values() for part in group if part.name in wanted]
    print(f"{len(todo)} parts, at most {sum(part.seconds for part in todo)} s: {', '.join(part.name for part in todo)}")
    outcomes = run_all(todo, results)
    failed = {name: outcome for name, outcome in outcomes.items() if outcome["failure"]}
    took = sum(outcome["seconds"] for outcome in outcomes.values())
    verdict = ", ".join(f"{name} ({outcome['failure']})" for name, outcome in failed.items())
    print(f"{took:.0f} s, results in {results}; " + (f"FAILED: {verdict}" if failed else "all parts passed"))
    return bool(failed)


def run_all(todo: list[GpuPart], results: Path) -> dict[str, dict[str, Any]]:
    """Run the parts one after another. The deadline of each is the sum of the seconds up to it.

    Returns the seconds, the failure ("" for none) and the result of each part by name, as in gpu.json.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands with &
    results.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, Any]] = {}
    deadline, are_gradients_wrong = time.monotonic(), False
    with (results / "gpu.log").open("w+") as log:
        for part in todo:
            deadline += part.seconds
            start = time.monotonic()
            if are_gradients_wrong and part.name != "tests":
                outcomes[part.name] = {"seconds": 0.0, "failure": f"not run: {GRADIENTS_PART} are wrong"}
                _save(outcomes, results)
                continue
            for stream in (sys.stdout, log):
                print(
                    f"== {part.name}, {deadline - start:.0f} s: python {' '.join(part.argv)}", file=stream, flush=True
                )
            if part.output is not None:
                part.output.parent.mkdir(parents=True, exist_ok=True)
                part.output.unlink(missing_ok=True)
            before = log.tell()
            failure = run(part.argv, deadline - start, log)
            printed = _read_log_from(Path(log.name), before)
            are_gradients_wrong |= part.name == GRADIENTS_PART and failure == f"exit code {EXIT_WRONG_GRADIENTS}"
            outcomes[part.name] = {"seconds": round(time.monotonic() - start, 1), "failure": failure}
            outcomes[part.name]["result"] = _read_result(part, printed)
            _save(outcomes, results)
            print(printed[-MAX_LOG_CHARACTERS:], flush=True)
            log.seek(0, os.SEEK_END)
    return outcomes


def _save(outcomes: dict[str, dict[str, Any]], results: Path) -> None:
    (results / "gpu.json").write_text(json.dumps({"parts": outcomes}, indent=1) + "\n")


def _read_log_from(path: Path, position: int) -> str:
    with path.open(errors="replace") as log:
        log.seek(position)
        return log.read()


def _read_result(part: GpuPart, printed: str) -> Any:
    """Return the JSON that the part wrote to its file, or printed; None for neither."""
    try:
        return json.loads(printed if part.output is None else part.output.read_text())
    except (OSError, ValueError):
        return None


def run(argv: list[str], limit_s: float, log: TextIO) -> str:
    """Run python with these arguments in the repository root; returns the reason of a failure, or "".

    GRACE_S before the limit the process is interrupted as by Ctrl-C, to save its results.
    """
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, *argv],
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
        _end_process(process)
        return f"stopped after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def _end_process(process: subprocess.Popen) -> None:
    """Wait GRACE_S for an interrupted process, then kill it and its children."""
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
