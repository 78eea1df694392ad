"""A run folder has one writer, and a resume that is refused leaves every byte of it."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoint import refused

from quaver.cli import main
from quaver.trainer.config import Checkpoint, Float8, LRScheduler, TrainConfig
from quaver.trainer.metrics import read_metrics
from quaver.trainer.run_lock import HOLDER, RunLock
from quaver.trainer.train import Run, prepare, train


@pytest.fixture
def config(tiny_config: TrainConfig) -> TrainConfig:
    """A delayed run with checkpoints after steps 2 and 4, whose learning rate is independent of training.steps."""
    return replace(
        tiny_config,
        float8=Float8(recipe_name="delayed", delayed_history_len=3),
        lr_scheduler=LRScheduler(schedule="constant", warmup_steps=2),
        checkpoint=Checkpoint(interval=2, keep_latest_k=0),
    )


def resumed(config: TrainConfig, steps: int) -> TrainConfig:
    checkpoint = replace(config.checkpoint, resume="must")
    return replace(config, training=replace(config.training, steps=steps), checkpoint=checkpoint)


def run_to_end(config: TrainConfig) -> Run:
    run = prepare(config)
    train(run)
    return run


def digest(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below `folder`, and the names of its folders."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for name, path in files.items()
    }


HOLD = """
import sys
from pathlib import Path
from quaver.trainer.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock of `folder`."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_resume_is_refused_and_changes_nothing(config, capsys):
    folder = run_to_end(config).folder.path
    with hold(folder) as holder:
        before = digest(folder)
        line = refused(["--resume", str(folder), "--training.steps=6", "--checkpoint.interval=5"], capsys)
        assert f"process {holder.pid} on host {platform.node()}" in line
        assert digest(folder) == before
        holder.stdin.close()
        holder.wait()


def test_a_run_holds_its_lock_until_it_has_ended(config, capsys):
    first = prepare(config)
    line = refused([*("--resume", str(first.folder.path)), "--checkpoint.resume=auto"], capsys)
    assert f"process {os.getpid()} on host" in line
    train(first)
    assert first.checkpoints.folder.steps() == [2, 4]
    assert not (first.folder.path / HOLDER).exists()
    assert run_to_end(resumed(config, 6)).began_at_step == 4


def test_the_lock_of_a_killed_run_is_taken_over_with_one_line(config, capsys):
    folder = run_to_end(config).folder.path
    with hold(folder) as holder:
        holder.kill()
        holder.wait()
    assert json.loads((folder / HOLDER).read_text())["pid"] == holder.pid
    capsys.readouterr()
    assert run_to_end(resumed(config, 6)).began_at_step == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was killed: process {holder.pid} on host {platform.node()}" in line


@pytest.mark.parametrize("holder", ["", "[]", "{", '{"pid": 1}'])
def test_a_damaged_holder_file_does_not_keep_a_run_from_its_folder(tmp_path, capsys, holder):
    (tmp_path / HOLDER).write_text(holder)
    RunLock(tmp_path).acquire()
    assert "took over the lock" in capsys.readouterr().err


def test_refused_resumes_leave_every_byte(config, tmp_path, capsys):
    whole = run_to_end(replace(resumed(config, 6), job=replace(config.job, name="whole"), checkpoint=config.checkpoint))
    folder = run_to_end(config).folder.path
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "text.txt").write_text("a")
    before = digest(folder)
    recipe = ["--float8.recipe_name=rowwise", "--float8.delayed_history_len=16"]
    for words, what in (
        ([*recipe, "--checkpoint.load_step=4"], "rowwise"),
        ([*recipe, "--checkpoint.load_step=2"], "rowwise"),
        (["--float8.enable_float8_linear=false", "--float8.recipe_name=tensorwise"], ""),
        (["--job.compare=true", "--training.steps=8"], "bfloat16"),
        (["--model.dim=64"], "model.dim must be 32"),
        (["--model.n_layers=3"], "model.n_layers must be 2"),
        (["--model.vocab_size=300"], "model.vocab_size"),
        (["--data.tokenizer=no-such-tokenizer"], "no-such-tokenizer"),
        ([f"--data={tmp_path / 'missing.txt'}"], "missing.txt"),
        ([f"--data={tmp_path / 'small'}"], "small"),
        (["--checkpoint.load_step=3"], "it has 2, 4"),
        (["--checkpoint.load_step=-2"], "checkpoint.load_step"),
        (["--training.steps=0"], "training.steps"),
        (["--training.no_such_setting=1"], "no_such_setting"),
        (["--parallelism.data_parallel_shard_degree=2"], "parallelism"),
    ):
        assert what in refused(["--resume", str(folder), *words], capsys)
        assert digest(folder) == before, words
    shard = next((folder / "checkpoint" / "step-00000004").rglob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    damaged = digest(folder)
    refused(["--resume", str(folder), "--training.steps=6"], capsys)
    assert digest(folder) == damaged
    shard.write_bytes(content)
    assert main(["train", "--resume", str(folder), "--training.steps=6"]) == 0
    keys = ("step", "loss", "grad_norm", "validation_loss")
    got, expected = (
        [[record.get(key) for key in keys] for record in read_metrics(path / "metrics.jsonl")]
        for path in (folder, whole.folder.path)
    )
    assert got == expected
