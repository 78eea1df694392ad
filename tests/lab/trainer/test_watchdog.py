"""Tests what a run that hangs leaves: the stacks of a slow task, and the timeout of a collective."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.lab.runs.checkpoint import Checkpointer
from quaver.lab.runs.errors import OutputFailures
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Comm
from quaver.lab.trainer import training_run
from quaver.lab.trainer.alarms import RunAlarms
from quaver.lab.trainer.process import Watchdog
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import prepare_run
from tests.isolated import Forked
from tests.lab.trainer.runs import with_settings


def test_steps_within_their_timeout_write_no_stacks(tmp_path, capsys):
    watchdog = Watchdog(tmp_path / "stacks-rank0.txt")
    with watchdog.watch(5, "step"):
        pass
    with watchdog.watch(0, "step"):
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


def train_slowly(stacks: Path) -> None:
    """Run Python code with deep stacks, compiled and called again and again."""

    def recurse(n):
        return 0 if n == 0 else 1 + recurse(n - 1)

    def compile_and_call(n):
        name = f"f{n % 7}"
        exec(
            f"def {name}(n):\n    return recurse(n) + sum(x for x in range(5))\n{name}({n % 30})", {"recurse": recurse}
        )

    with Watchdog(stacks).watch(0.002, "step 1"):
        n, deadline = 0, time.monotonic() + 60
        # Rarely, because the watchdog's thread gets the GIL at each read, and in between after 5 ms.
        while n % 2000 or not stacks.exists() or stacks.read_text().count("Current thread") < 300:
            assert n % 2000 or time.monotonic() < deadline
            compile_and_call(n := n + 1)


def test_reading_stacks_does_not_crash_a_slow_step(tmp_path):
    """Stacks read while Python code runs would end the process by a segmentation fault after some hundred reads."""
    path = tmp_path / "stacks-rank0.txt"
    process = Forked(train_slowly, path).finished()
    assert process.returncode == 0, process.stderr
    assert "compile_and_call" in path.read_text()


def test_a_step_that_is_stuck_leaves_its_stack_and_the_run_goes_on(tiny_config, monkeypatch, before_each_step, capsys):
    run = prepare_run(replace(with_settings(tiny_config, training={"steps": 3}), comm=Comm(watchdog_seconds=1)))
    path = run.folder.get_stacks_path(0)

    def hang_in_step_2(model: TrainedModel, step: int) -> None:
        while step == 2 and not (path.exists() and "in hang_in_step_2" in path.read_text()):
            time.sleep(0.01)

    before_each_step(hang_in_step_2)
    monkeypatch.setattr(training_run, "SLOW_TASK_FACTOR", 30)
    assert train(run)["status"] == "finished"
    line = f"quaver: step 2 of bfloat16 on rank 0 takes longer than 1 s; its stacks are in {path}"
    assert capsys.readouterr().err.splitlines().count(line) == 1  # other steps may be late, too, on a busy machine


@pytest.mark.parametrize(
    ("owner", "method", "steps_before", "task"),
    [
        (Ranks, "holds_on_any", 0, "the agreement before step 1"),
        (RunAlarms, "pop_fallbacks", 1, "the fallback after step 1"),
        (TrainedModel, "validate", 1, "the validation after step 1"),
        (Checkpointer, "save", 1, "the checkpoint of step 1"),
        (OutputFailures, "raise_on_all_ranks", 1, "the agreement after the last step"),
    ],
)
def test_a_task_that_is_stuck_leaves_its_stack(
    tiny_float8_config, monkeypatch, capsys, owner, method, steps_before, task
):
    numerics = {"every": 1, "on_alarm": "fallback"}
    config = with_settings(tiny_float8_config, job={"compare": False}, training={"steps": 1}, numerics=numerics)
    run = prepare_run(replace(config, comm=Comm(watchdog_seconds=1)))
    path = run.folder.get_stacks_path(0)
    work = getattr(owner, method)

    def hang_and_work(*arguments: object) -> object:
        deadline = time.monotonic() + 60
        while run.progress.step == steps_before and time.monotonic() < deadline:
            if path.exists() and "in hang_and_work" in path.read_text():
                break
            time.sleep(0.01)
        return work(*arguments)

    monkeypatch.setattr(owner, method, hang_and_work)
    monkeypatch.setattr(training_run, "SLOW_TASK_FACTOR", 1)
    assert train(run)["status"] == "finished"
    assert f"quaver: {task} on rank 0 takes longer than 1 s; its stacks are in {path}" in capsys.readouterr().err


def wait_in_a_collective(rank: int, port: int, folder: Path) -> None:
    """Rank 0 waits for rank 1, which does not come before rank 0 has raised."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with Ranks(rank, rank, 2).open_process_group(torch.device("cpu"), timeout_seconds=1):
        if rank == 0:
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                torch.distributed.all_reduce(torch.ones(1))
            (folder / "raised").touch()
        while not (folder / "raised").exists():
            time.sleep(0.02)
        os._exit(0)


@pytest.mark.nightly
def test_a_collective_raises_after_its_timeout(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [Forked(wait_in_a_collective, rank, port, tmp_path) for rank in range(2)]
    processes = [rank.finished() for rank in ranks]
    assert [process.returncode for process in processes] == [0, 0], processes
    assert (tmp_path / "raised").exists()
