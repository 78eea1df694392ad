"""Runs that are killed, stopped or out of disk space resume to the bit, and keep their last complete checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.reliability import Runs, run_parts
from quaver.lab.cli import main
from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.runs.lock import HOLDER_FILE
from tests.command_line import TEXT, TINY, quaver, quaver_on_ranks
from tests.isolated import Forked
from tests.lab.trainer.runs import read_steps

LIMIT_S = 300


@pytest.fixture
def run_argv(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    argv = [*TINY, "--model.n_layers=1", "--lr_scheduler.schedule=constant", "--lr_scheduler.warmup_steps=3"]
    argv += ["--float8.recipe_name=delayed"]
    return [*argv, f"--data={text}", f"--job.dump_folder={tmp_path / 'runs'}"]


def read_numbers(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step."""
    records = read_steps(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "steps are missing or doubled"
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def open_checkpoints(run: Path) -> CheckpointFolder:
    return CheckpointFolder(run / "checkpoint")


def wait_for(condition: Callable[[], bool], *processes: Forked) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def has_steps(run: Path, number: int = 3) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= number


def test_ctrl_c_saves_and_the_run_resumes(run_argv, tmp_path):
    run = tmp_path / "runs" / "stopped"
    process = quaver(["train", *run_argv, "--job.name=stopped", "--training.steps=1000000"])
    wait_for(lambda: has_steps(run), process)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate()
    assert (process.returncode, error) == (130, "")
    assert f"quaver train --resume {run}" in output
    (step,) = open_checkpoints(run).list_steps()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], max(read_numbers(run))) == ("interrupted", step, step)
    assert (run / "curves.png").stat().st_size > 1000
    assert main(["train", "--resume", str(run), f"--training.steps={step + 3}"]) == 0
    assert main(["train", *run_argv, "--job.name=whole", f"--training.steps={step + 3}"]) == 0
    assert read_numbers(run) == read_numbers(tmp_path / "runs" / "whole")


def start_by_hand(argv: list[str]) -> list[Forked]:
    return quaver_on_ranks(2, argv)


def start_by_torchrun(argv: list[str]) -> list[subprocess.Popen]:
    """torchrun forwards a SIGTERM to its ranks; each process imports torch for seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return [subprocess.Popen([*launcher, "-m", "quaver", *argv], **options)]


def list_with_children(pid: int) -> list[int]:
    """Return a process and what it started, as torchrun its ranks, each in a session of its own."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a launcher")
@pytest.mark.parametrize("start", [start_by_hand, pytest.param(start_by_torchrun, marks=pytest.mark.nightly)])
def test_two_ranks_hold_their_run_and_save_at_sigterm(run_argv, tmp_path, start):
    run = tmp_path / "runs" / "stopped"
    processes = start(["train", *run_argv, "--job.name=stopped", "--training.steps=1000000"])
    wait_for(lambda: has_steps(run), *processes)
    resume = ["train", f"--resume={run}", "--checkpoint.resume=auto"]
    second, _ = [rank.finished() for rank in quaver_on_ranks(2, resume)]
    (line,) = [line for line in second.stderr.splitlines() if line.startswith("quaver: ")]
    holder = json.loads((run / HOLDER_FILE).read_text())["pid"]
    assert holder in [pid for process in processes for pid in list_with_children(process.pid)]
    assert f"another run writes the run folder '{run}': process {holder} on host" in line
    assert all(process.poll() is None for process in processes)
    for process in processes:  # as schedulers do: the ranks, then torchrun, which signals the ranks again
        for pid in (*reversed(list_with_children(process.pid)), process.pid):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)  # signals that are pending count once
    assert f"quaver train --resume {run}" in "".join(process.communicate(timeout=LIMIT_S)[0] for process in processes)
    (step,) = open_checkpoints(run).list_steps()
    assert list(read_numbers(run)) == list(range(1, step + 1))
    assert len(list((open_checkpoints(run).get_path(step) / "delayed").glob("*.distcp"))) == 2


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(run_argv, tmp_path):
    """A limit on the size of files simulates it: the same write fails, with another message."""
    run = tmp_path / "runs" / "full"
    argv = [*run_argv, "--job.name=full", "--checkpoint.interval=4"]
    assert main(["train", *argv, "--training.steps=4"]) == 0
    before = {path: path.read_bytes() for path in (run / "checkpoint").rglob("*") if path.is_file()}
    resume = ["train", "--resume", str(run), "--training.steps=1000"]
    process = quaver(resume, largest_file_bytes=200_000).finished()
    assert process.returncode == 4
    (line,) = process.stderr.splitlines()
    assert "checkpoint of step 8 could not be written" in line
    assert "File too large" in line
    assert "the checkpoint of step 4 is intact" in line
    assert {path: path.read_bytes() for path in (run / "checkpoint").rglob("*") if path.is_file()} == before
    assert json.loads((run / "summary.json").read_text())["status"] == "checkpoint failed"
    assert main(["train", "--resume", str(run), "--training.steps=10"]) == 0


def test_a_reliability_run_that_fails_before_its_first_step_ends_the_script(tmp_path):
    (tmp_path / "stderr").write_text("no space left\n")
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as process,
        pytest.raises(SystemExit, match=r"the run signals ended before its first step: \['no space left'\]"),
    ):
        Runs(tmp_path).wait_for_step("signals", 0, process.pid)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a launcher")
@pytest.mark.parametrize(
    "argv",
    [
        # Before the manifest; test_hostile_checkpoint.py has the steps from there on.
        pytest.param(["--part", "phases", "--tries", "5"], id="a kill at each step that writes tensors"),
        pytest.param(["--part", "phases", "--tries", "11"], id="a kill at each step", marks=pytest.mark.nightly),
        pytest.param(["--part", "disks", "--tries", "3", "--part", "damage"], id="little", marks=pytest.mark.nightly),
        pytest.param(["--part", "cost", "--tries", "2"], id="the cost of a manifest", marks=pytest.mark.nightly),
        pytest.param([], id="everything", marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
    ],
)
def test_every_reliability_scenario_holds(argv):
    """Each try of benchmarks/reliability.py."""
    process = Forked(run_parts, argv)
    _, error = process.communicate(timeout=7200)
    assert process.returncode == 0, error
