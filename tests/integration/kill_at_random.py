"""Kills `quaver train` at random moments and resumes it, many times; test_resume.py runs this script.

Each run is a fork of this process, which has imported everything and has one thread, so that a start takes a fraction
of a second. Prints JSON: the number of kills, how many of them hit a checkpoint being written, and the newest step.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import quaver.trainer.train  # noqa: F401 - imported once, before the forks
from quaver.cli import main
from quaver.trainer.checkpoint_folder import CheckpointFolder


def start(words: list[str]) -> int:
    """Fork a run and return its process id."""
    child = os.fork()
    if child:
        return child
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    code = 1
    try:
        code = main(["train", *words])
    except SystemExit as stopped:
        code = stopped.code
    finally:
        os._exit(code)


def wait_for_a_step(metrics: Path, size: int) -> None:
    """Return when a step was appended to the metrics, beyond `size` bytes."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > size:
            return
        time.sleep(0.002)
    raise SystemExit("the run did no step in 60 s")


def kill_many_times(words: list[str], folder: CheckpointFolder, kills: int, seed: int) -> dict[str, int]:
    """Kill `kills` runs, most after their first steps; the newest complete checkpoint must never be lost."""
    chance = random.Random(seed)
    metrics = folder.path.with_name("metrics.jsonl")
    newest, while_writing = 0, 0
    for _ in range(kills):
        size = metrics.stat().st_size if metrics.exists() else 0
        child = start(words)
        if chance.random() < 0.25:  # while it starts, reads the checkpoint, and rewinds the metrics
            time.sleep(chance.uniform(0.0, 0.6))
        else:
            wait_for_a_step(metrics, size)
            time.sleep(chance.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the run was not killed but exited with {os.waitstatus_to_exitcode(status)}")
        while_writing += any(folder.path.glob(".step-*.partial"))
        steps = folder.steps()
        if newest and not (steps and steps[-1] >= newest):
            raise SystemExit(f"the checkpoint of step {newest} was lost: now there is {steps}")
        newest = steps[-1] if steps else 0
    return {"kills": kills, "while_writing": while_writing, "newest": newest}


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    result = kill_many_times(
        options["words"], CheckpointFolder(Path(options["checkpoints"])), options["kills"], options["seed"]
    )
    process = start([*options["words"], f"--training.steps={result['newest'] + 5}"])
    result["last_exit"] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps(result))
