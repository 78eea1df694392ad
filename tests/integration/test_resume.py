"""Runs that are killed, stopped or out of disk space resume to the bit, and keep their last complete checkpoint."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quaver.cli import main
from quaver.trainer.checkpoint_folder import CheckpointFolder
from quaver.trainer.metrics import read_metrics
from quaver.trainer.run_lock import HOLDER

TINY = [
    *("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=48"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cpu"),
    *("--validation.freq=1000000", "--validation.steps=2", "--metrics.log_freq=1", "--lr_scheduler.schedule=constant"),
    *("--lr_scheduler.warmup_steps=3", "--float8.recipe_name=delayed"),
]
LIMIT_S = 300


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    return [*TINY, f"--data={text}", f"--job.dump_folder={tmp_path / 'runs'}"]


def numbers(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "steps are missing or doubled"
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def checkpoints(run: Path) -> CheckpointFolder:
    return CheckpointFolder(run / "checkpoint")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_killed_at_50_random_moments(where, tmp_path):
    """Every checkpoint can be resumed from, and the run has the bits of one that was not killed."""
    run = tmp_path / "runs" / "killed"
    words = [*where, "--job.name=killed", "--checkpoint.resume=auto", "--checkpoint.interval=2"]
    words += ["--checkpoint.keep_latest_k=2", "--training.steps=1000000"]
    options = {"words": words, "checkpoints": str(run / "checkpoint"), "kills": 50, "seed": 1}
    script = Path(__file__).with_name("kill_at_random.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 50
    assert result["last_exit"] == 0, done.stderr
    assert result["while_writing"] >= 2, "no kill hit a write"
    assert result["newest"] >= 30
    assert len(checkpoints(run).steps()) <= 2
    assert not list((run / "checkpoint").glob(".step-*"))

    assert main(["train", *where, "--job.name=whole", f"--training.steps={result['newest'] + 5}"]) == 0
    assert numbers(run) == numbers(tmp_path / "runs" / "whole")


def on_two_ranks(words: list[str]) -> "subprocess.Popen[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*launcher, "-m", "quaver.cli", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def children_of(pid: int) -> list[int]:
    """Return the ranks that torchrun started, each in its own session."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a launcher")
def test_two_ranks_killed_at_a_random_step(where, tmp_path):
    """FSDP2 with a float8 all-gather; then one process resumes from what two wrote."""
    gather = ["--float8.enable_fsdp_float8_all_gather", "--training.global_batch_size=4"]
    words = [*where, *gather, "--job.name=killed", "--checkpoint.interval=2", "--checkpoint.resume=auto"]
    run = tmp_path / "runs" / "killed"
    process = on_two_ranks([*words, "--training.steps=1000000"])
    step = random.Random(2).randint(4, 12)
    deadline = time.monotonic() + LIMIT_S
    while not (checkpoints(run).steps() and checkpoints(run).steps()[-1] >= step):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for each in [process.pid, *children_of(process.pid)]:
        os.kill(each, signal.SIGKILL)
    process.communicate()
    reached = checkpoints(run).steps()[-1]
    resumed = on_two_ranks([*words, f"--training.steps={reached + 4}"])
    output, error = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, error
    assert f"resumed      after step {reached}" in output

    whole = on_two_ranks([*where, *gather, "--job.name=whole", f"--training.steps={reached + 4}"])
    assert whole.wait(LIMIT_S) == 0, whole.communicate()[1]
    whole.communicate()
    assert numbers(run) == numbers(tmp_path / "runs" / "whole")

    alone = ["--float8.no-enable_fsdp_float8_all_gather", f"--training.steps={reached + 6}"]
    assert main(["train", f"--resume={run}", *alone]) == 0
    losses = numbers(run)
    assert list(losses) == list(range(1, reached + 7))
    assert losses[reached + 6][0] == pytest.approx(losses[reached + 4][0], rel=0.2)


def wait_for_steps(process: "subprocess.Popen[str]", run: Path) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def test_ctrl_c_saves_and_the_run_resumes(where, tmp_path):
    run = tmp_path / "runs" / "stopped"
    words = [sys.executable, "-m", "quaver.cli", "train", *where, "--job.name=stopped", "--training.steps=1000000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for_steps(process, run)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (130, "")
    assert f"quaver train --resume {run}" in output
    (step,) = checkpoints(run).steps()
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert main(["train", "--resume", str(run), f"--training.steps={step + 3}"]) == 0
    assert main(["train", *where, "--job.name=whole", f"--training.steps={step + 3}"]) == 0
    assert numbers(run) == numbers(tmp_path / "runs" / "whole")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a launcher")
def test_two_ranks_hold_their_run_and_save_at_sigterm(where, tmp_path):
    run = tmp_path / "runs" / "stopped"
    process = on_two_ranks([*where, "--job.name=stopped", "--training.steps=1000000"])
    wait_for_steps(process, run)
    second = on_two_ranks([f"--resume={run}", "--checkpoint.resume=auto"])
    _, error = second.communicate(timeout=LIMIT_S)
    (line,) = [line for line in error.splitlines() if line.startswith("quaver: ")]
    holder = json.loads((run / HOLDER).read_text())["pid"]
    assert holder in children_of(process.pid)
    assert f"another run writes the run folder '{run}': process {holder} on host" in line
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # torchrun forwards it to its ranks
    output, _ = process.communicate(timeout=LIMIT_S)
    assert f"quaver train --resume {run}" in output
    (step,) = checkpoints(run).steps()
    assert list(numbers(run)) == list(range(1, step + 1))
    assert len(list((checkpoints(run).complete(step) / "delayed").glob("*.distcp"))) == 2


def _no_file_above(limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(where, tmp_path):
    """A limit on the size of files simulates it: the same write fails, with another message."""
    run = tmp_path / "runs" / "full"
    words = [*where, "--job.name=full", "--checkpoint.interval=4"]
    assert main(["train", *words, "--training.steps=4"]) == 0
    before = {path: path.read_bytes() for path in (run / "checkpoint").rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "quaver.cli", "train", "--resume", str(run), "--training.steps=1000"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
        preexec_fn=lambda: _no_file_above(200_000),
    )
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert "checkpoint of step 8 could not be written" in line
    assert "File too large" in line
    assert "the checkpoint of step 4 is intact" in line
    assert {path: path.read_bytes() for path in (run / "checkpoint").rglob("*") if path.is_file()} == before
    assert json.loads((run / "summary.json").read_text())["status"] == "checkpoint failed"
    assert main(["train", "--resume", str(run), "--training.steps=10"]) == 0
