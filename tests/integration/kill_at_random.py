"""What test_resume.py starts: `quaver train` killed at random moments, and gone on with, many times.

Each run is a fork of this process, which has imported everything and started no thread, so that a start takes a
fraction of a second. Prints JSON: how often it killed, and in how many of the kills a checkpoint was being written.
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
from quaver.trainer.checkpoints.folder import CheckpointFolder


def start(words: list[str]) -> int:
    """Fork a run; return its process."""
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
    """Return when the file of metrics has grown beyond `size`, or been cut back and grown again, by a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > size:
            return
        time.sleep(0.002)
    raise SystemExit("a run made no step in 60 s")


def kill_many_times(words: list[str], folder: CheckpointFolder, kills: int, seed: int) -> dict[str, int]:
    """Kill `kills` runs at random, most after their first steps; the checkpoints' folder must never go back."""
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
            raise SystemExit(f"a run ended by itself with {os.waitstatus_to_exitcode(status)}")
        while_writing += any(folder.path.glob(".step-*.partial"))
        steps = folder.steps()
        if newest and not (steps and steps[-1] >= newest):
            raise SystemExit(f"there was a checkpoint of step {newest}, and now there is {steps}")
        newest = steps[-1] if steps else 0
    return {"kills": kills, "while_writing": while_writing, "newest": newest}


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    told = kill_many_times(
        options["words"], CheckpointFolder(Path(options["checkpoints"])), options["kills"], options["seed"]
    )
    process = start([*options["words"], f"--training.steps={told['newest'] + 5}"])
    told["last_exit"] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps(told))
